/* What would have been accepted, place by place, in the answers of `tandem bench --spec`?
 *
 *   draft_traces --target PATH --draft PATH [--tokens N] > tests/draft_traces.h
 *
 * A greedy answer does not depend on who drafts, so three facts about each of its places say what
 * any choice of draft lengths would have met: how long lookup's match is there, how many of its
 * tokens in a row are right, and whether the draft model's token for that place is right. The model
 * is watched at fixed lengths: an accepted token was right, the one that ended a round early was
 * wrong; a place that no length judged (it came behind a whole draft each time) counts as wrong and
 * is counted on stderr. tests/test_draft_trace.c replays the traces. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/number.h"
#include "cmd/bell.h"
#include "cmd/bench_kinds.h"
#include "draft/lookup.h"
#include "engine/engine.h"

enum { MAX_TOKENS = 512, DRAFT = 8, NOT_JUDGED = 2 };

static const char head[] =
    "#ifndef TANDEM_TESTS_DRAFT_TRACES_H\n"
    "#define TANDEM_TESTS_DRAFT_TRACES_H\n"
    "\n"
    "/* What any choice of draft lengths would meet in the answers of `tandem bench --spec`, "
    "default\n"
    " * pair, greedy; written by bench/draft_traces. A character a place, from the answer's second "
    "token\n"
    " * on: how long lookup's match is there (0: none; base 36), how many of its eight tokens in a "
    "row\n"
    " * are right, whether the draft model's token for the place is right. */\n"
    "\n"
    "static const struct draft_trace {\n"
    "    const char *name;\n"
    "    int n_prompt;\n"
    "    const char *match, *run, *model;\n"
    "} draft_traces[] = {\n";
static const char tail[] = "};\n"
                           "\n"
                           "#endif\n";

static void must(int rc, const struct err *e) {
    if (rc == 0) return;
    fprintf(stderr, "draft_traces: %s\n", e->message);
    exit(1);
}

static int answer(struct engine *g, const struct tokens *prompt, int n_tokens, int n_draft,
                  int32_t *out, uint8_t *drafted, struct engine_speculation *s) {
    static struct bell bell = BELL_INIT;
    struct engine_request *r;
    struct engine_progress p;
    struct err e = {0};
    struct engine_submit_options so = {.prompt = prompt->ids,
                                       .n_prompt = (int)prompt->n,
                                       .notify = bell_ring,
                                       .notify_arg = &bell};
    verify_params_default(&so.params);
    so.params.temperature = 0;
    so.params.max_tokens = n_tokens;
    so.params.draft_tokens = n_draft;
    so.params.draft_model = true;
    so.params.lookup = false;
    must(engine_submit(g, &so, &r, &e), &e);
    do {
        bell_wait(&bell);
        engine_poll(r, &p);
    } while (p.finish == ENGINE_RUNNING);
    if (p.finish == ENGINE_FAILED) must(err_raise(&e, p.error_code, "%s", p.error), &e);
    int n = p.n_tokens;
    memcpy(out, p.tokens, (size_t)n * sizeof *out);
    memcpy(drafted, p.drafted, (size_t)n);
    *s = p.speculation;
    engine_release(g, r);
    return n;
}

/* One answer at a fixed length tells of the places that its rounds judged. */
static void judge(const uint8_t *drafted, int n, int n_tokens, int n_draft, uint64_t n_rounds,
                  uint8_t *right) {
    uint64_t rounds = 0;
    for (int k = 1; k < n; rounds++) {
        int most = n_tokens - k - 1 < n_draft ? n_tokens - k - 1 : n_draft, a = 0;
        if (most == 0) break;
        while (a < most && k + a < n && drafted[k + a]) right[k + a++] = 1;
        if (a < most && k + a < n) {
            if (right[k + a] == 1) fprintf(stderr, "place %d was right before, now wrong\n", k + a);
            right[k + a] = 0;
        }
        k += a + 1;
    }
    if (rounds != n_rounds)
        fprintf(stderr, "length %d: %llu rounds drafted, not %llu: places may be wrong\n", n_draft,
                (unsigned long long)n_rounds, (unsigned long long)rounds);
}

static void print_line(const char *name, const char *line, int n) {
    printf("     .%s =\n", name);
    for (int i = 0; i < n; i += 84)
        printf("         \"%.*s\"%s\n", n - i < 84 ? n - i : 84, line + i, i + 84 >= n ? "," : "");
}

static void trace(struct engine *g, const struct bench_kind *kind, int n_tokens) {
    static int32_t ids[1 << 16], out[MAX_TOKENS];
    static const char digits[] = "0123456789abcdefghijklmnopqrstuvw";
    uint8_t drafted[MAX_TOKENS], right[MAX_TOKENS];
    char match[MAX_TOKENS], run[MAX_TOKENS], model[MAX_TOKENS];
    struct engine_speculation s;
    struct tokens prompt = {0};
    struct err e = {0};
    struct chat_message m = {
        .role = "user", .content = kind->text, .content_bytes = strlen(kind->text)};
    must(chat_render(engine_chat(g), engine_tokenizer(g), &m, 1, true, &prompt, &e), &e);
    int n_prompt = (int)prompt.n, n_missing = 0;
    if (n_prompt > (1 << 16) - MAX_TOKENS) must(err_raise(&e, E_INVALID, "prompt too long"), &e);
    int n = answer(g, &prompt, n_tokens, 0, out, drafted, &s);
    memset(right, NOT_JUDGED, sizeof right);
    for (int g_fixed = 1; g_fixed <= DRAFT; g_fixed++) {
        int got = answer(g, &prompt, n_tokens, g_fixed, out, drafted, &s);
        if (got != n) must(err_raise(&e, E_INVALID, "answers differ"), &e);
        judge(drafted, n, n_tokens, g_fixed, s.n_rounds, right);
    }
    memcpy(ids, prompt.ids, prompt.n * sizeof *ids);
    memcpy(ids + n_prompt, out, (size_t)n * sizeof *ids);
    struct draft_lookup l;
    void *memory = malloc(draft_lookup_bytes(n_prompt + n));
    if (!memory) must(err_raise(&e, E_NOMEM, "no memory"), &e);
    draft_lookup_init(&l, memory, n_prompt + n);
    for (int k = 1; k < n; k++) {
        int32_t ready[DRAFT];
        int n_match, a = 0;
        draft_lookup_extend(&l, ids, n_prompt + k);
        int n_ready = draft_lookup_propose(&l, ids, n_prompt + k, DRAFT, ready, &n_match);
        while (a < n_ready && k + a < n && ready[a] == out[k + a]) a++;
        match[k - 1] = digits[n_ready ? n_match : 0];
        run[k - 1] = digits[a];
        model[k - 1] = right[k] == 1 ? '1' : '0';
        n_missing += right[k] == NOT_JUDGED;
    }
    fprintf(stderr, "%s: %d tokens, %d places not judged\n", kind->name, n, n_missing);
    printf("    {.name = \"%s\",\n     .n_prompt = %d,\n", kind->name, n_prompt);
    print_line("match", match, n - 1);
    print_line("run", run, n - 1);
    print_line("model", model, n - 1);
    printf("    },\n");
    free(memory);
    tokens_deinit(&prompt);
}

int main(int argc, char **argv) {
    struct engine_options o;
    struct engine *g;
    struct err e = {0};
    int n_tokens = 192;
    engine_options_default(&o);
    o.kv_memory_bytes = (size_t)400 << 20;
    o.context = 2048;
    o.max_seqs = 1;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--target")) o.model_path = argv[i + 1];
        else if (!strcmp(argv[i], "--draft")) o.draft_path = argv[i + 1];
        else if (!strcmp(argv[i], "--tokens") &&
                 !number_in(argv[i + 1], strlen(argv[i + 1]), 2, MAX_TOKENS, &n_tokens))
            n_tokens = 0;
    }
    if (!o.model_path || !o.draft_path || n_tokens == 0) {
        fprintf(stderr, "usage: draft_traces --target PATH --draft PATH [--tokens 2..%d]\n",
                MAX_TOKENS);
        return 2;
    }
    must(engine_open(&g, &o, NULL, NULL, &e), &e);
    printf("%s", head);
    for (int i = 0; bench_kinds[i].name; i++) trace(g, &bench_kinds[i], n_tokens);
    printf("%s", tail);
    engine_close(g);
    return 0;
}
