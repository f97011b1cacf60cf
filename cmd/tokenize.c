/* `tandem tokenize`: the tokens of a text, for people (id and text a line) or for programs (--ids,
 * --json). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/strbuf.h"
#include "cmd/cmd.h"
#include "cmd/options.h"
#include "cmd/text.h"
#include "model/source.h"

static void print_tokens(const struct tokenizer *t, const struct tokens *v, bool ids_only,
                         bool json) {
    struct strbuf out = {0}, piece = {0};
    if (json) strbuf_append_str(&out, "[");
    for (size_t i = 0; i < v->n; i++) {
        if (ids_only) {
            strbuf_printf(&out, i ? " %d" : "%d", v->ids[i]);
            continue;
        }
        strbuf_clear(&piece);
        tokenizer_token_bytes(t, v->ids[i], true, &piece);
        if (json) strbuf_printf(&out, "%s\n  {\"id\": %d, \"text\": ", i ? "," : "", v->ids[i]);
        else strbuf_printf(&out, "%7d  ", v->ids[i]);
        strbuf_append_json(&out, piece.data ? piece.data : "", piece.n);
        strbuf_append_str(&out, json ? "}" : "\n");
    }
    if (json) strbuf_append_str(&out, "\n]");
    if (json || ids_only) strbuf_append_char(&out, '\n');
    if (out.n) fwrite(out.data, 1, out.n, stdout);
    strbuf_deinit(&out);
    strbuf_deinit(&piece);
}

int cmd_tokenize(int argc, char **argv) {
    const char *model = NULL, *file = NULL;
    bool special = false, add_special = true, ids_only = false, json = false, quiet = false;
    const struct option table[] = {
        {OPTION_STRING, "model", NULL, 'm', &model, "PATH", 0, 0,
         "GGUF file or Hugging Face folder", NULL},
        {OPTION_STRING, "file", NULL, 'f', &file, "PATH", 0, 0, "take the text from a file", NULL},
        {OPTION_FLAG, "special", "parse-special", 0, &special, NULL, 0, 0,
         "\"<|im_start|>\" in the text is its token", NULL},
        {OPTION_FLAG, "add-special", NULL, 0, &add_special, NULL, 0, 0,
         "begin and end tokens as the model wants them (--no-add-special)", "on"},
        {OPTION_FLAG, "ids", NULL, 0, &ids_only, NULL, 0, 0, "ids alone, on one line", NULL},
        {OPTION_FLAG, "json", NULL, 0, &json, NULL, 0, 0, "a JSON list of {id, text}", NULL},
        {OPTION_FLAG, "quiet", NULL, 'q', &quiet, NULL, 0, 0, "no talk on stderr", NULL},
        {0},
    };
    struct options o = {.command = "tokenize",
                        .usage = "tandem tokenize -m MODEL [TEXT | -f FILE | < FILE]",
                        .about = "Show the tokens of a text as the model's own tokenizer cuts it.",
                        .table = table,
                        .max_words = 1};
    int rc = options_parse(&o, argc, argv);
    if (rc >= 0) return rc;
    if (!model) return options_error(&o, "--model is needed");
    if (quiet) log_set_level(LOG_ERROR);
    struct err e = {0};
    struct strbuf text = {0};
    struct tokenizer *t = NULL;
    struct tokens ids = {0};
    rc = cmd_text(&text, o.n_words ? o.words[0] : NULL, file, &e);
    if (!rc) rc = cmd_open_tokenizer(&t, model, &e);
    unsigned flags =
        (add_special ? TOKENIZER_ADD_SPECIAL : 0u) | (special ? TOKENIZER_PARSE_SPECIAL : 0u);
    if (!rc) rc = tokenizer_encode(t, text.data ? text.data : "", text.n, flags, &ids, &e);
    if (!rc) {
        print_tokens(t, &ids, ids_only, json);
        if (!ids_only && !json) log_info("%zu tokens, %zu bytes", ids.n, text.n);
    }
    tokens_deinit(&ids);
    tokenizer_close(t);
    strbuf_deinit(&text);
    return rc ? cmd_fail(&e) : 0;
}
