#include "cmd/text.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/err.h"
#include "base/file.h"
#include "model/source.h"

enum { TEXT_LIMIT = 64 << 20 };

static int read_stream(struct strbuf *out, FILE *f, struct err *e) {
    char chunk[65536];
    size_t n;
    while ((n = fread(chunk, 1, sizeof chunk, f)) > 0) strbuf_append(out, chunk, n);
    if (out->failed)
        return err_raise(e, E_TOO_LONG, "the text on stdin is longer than %d bytes", TEXT_LIMIT);
    return ferror(f) ? err_raise(e, E_IO, "cannot read stdin") : 0;
}

int cmd_text(struct strbuf *out, const char *word, const char *file, struct err *e) {
    out->limit = TEXT_LIMIT;
    if (word && strcmp(word, "-") != 0) {
        strbuf_append_str(out, word);
        return 0;
    }
    if (file && strcmp(file, "-") != 0) {
        struct file f;
        int rc = file_read(&f, file, TEXT_LIMIT, e);
        if (rc) return err_prefix(e, rc, "--file");
        strbuf_append(out, f.data, f.bytes);
        file_close(&f);
        return 0;
    }
    if (!word && !file && isatty(STDIN_FILENO))
        return err_raise(e, E_INVALID, "no text: give it as a word, with --file, or on stdin");
    return read_stream(out, stdin, e);
}

int cmd_open_tokenizer(struct tokenizer **out, const char *model_path, struct err *e) {
    struct model_source *src;
    int rc = model_source_plan_only(&src, model_path, e);
    if (rc) return rc;
    const struct gguf *g = model_source_gguf(src);
    if (!g && !model_source_folder(src)) {
        model_source_close(src);
        return err_raise(e, E_INVALID, "%s: a config.json alone has no tokenizer; give its folder",
                         model_path);
    }
    rc = g ? tokenizer_open_gguf(out, g, e) : tokenizer_open_hf(out, model_source_folder(src), e);
    model_source_close(src);
    return rc;
}

const char *cmd_bytes(double b) {
    static char text[4][32];
    static int turn;
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    int u = 0;
    while (b >= 1024 && u < 4) b /= 1024, u++;
    char *out = text[turn++ % 4];
    snprintf(out, sizeof text[0], u ? "%.2f %s" : "%.0f %s", b, units[u]);
    return out;
}
