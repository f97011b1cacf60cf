/* A tool for the golden makers, no test: ids of NUL-separated texts from stdin, one line a text.
 * usage: tool_tokenize FILE.gguf|FOLDER [special] [bos]; `time` reports the seconds on stderr. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/err.h"
#include "model/gguf.h"
#include "model/tokenizer.h"

int main(int argc, char **argv) {
    struct err e = {0};
    struct gguf *g = NULL;
    struct tokenizer *t = NULL;
    unsigned flags = 0;
    if (argc < 2) return 2;
    for (int i = 2; i < argc; i++) {
        if (!strcmp(argv[i], "special")) flags |= TOKENIZER_PARSE_SPECIAL;
        if (!strcmp(argv[i], "bos")) flags |= TOKENIZER_ADD_SPECIAL;
    }
    size_t path_n = strlen(argv[1]);
    int64_t start = clock_ns();
    int rc;
    if (path_n > 5 && !strcmp(argv[1] + path_n - 5, ".gguf")) {
        rc = gguf_open(&g, argv[1], &e);
        if (!rc) rc = tokenizer_open_gguf(&t, g, &e);
    } else {
        rc = tokenizer_open_hf(&t, argv[1], &e);
    }
    if (rc) {
        fprintf(stderr, "%s: %s\n", argv[1], e.message);
        return 1;
    }
    fprintf(stderr, "%s: %d tokens, fingerprint %016llx, opened in %.0f ms\n", argv[1],
            tokenizer_n_tokens(t), (unsigned long long)tokenizer_fingerprint(t), clock_ms_since(start));
    char *line = NULL;
    size_t cap = 0;
    ssize_t n;
    start = clock_ns();
    long long n_tokens = 0;
    while ((n = getdelim(&line, &cap, 0, stdin)) > 0) {
        if (line[n - 1] == 0) n--;
        struct tokens ids = {0};
        if (tokenizer_encode(t, line, (size_t)n, flags, &ids, &e)) {
            fprintf(stderr, "%s\n", e.message);
            return 1;
        }
        for (size_t i = 0; i < ids.n; i++) printf(i ? " %d" : "%d", ids.ids[i]);
        printf("\n");
        n_tokens += (long long)ids.n;
        tokens_deinit(&ids);
    }
    fprintf(stderr, "%lld tokens in %.0f ms\n", n_tokens, clock_ms_since(start));
    free(line);
    tokenizer_close(t);
    gguf_close(g);
    return 0;
}
