/* A tool for the golden makers, no test.
 *   tool_tokenize ids FILE.gguf|FOLDER [special] [bos]   ids of NUL-separated texts, one line a
 * text tool_tokenize texts COUNT                            the test texts, each followed by NUL
 *   tool_tokenize family                                 family of the chat template on stdin */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/err.h"
#include "model/chat.h"
#include "model/gguf.h"
#include "model/tokenizer.h"
#include "tests/texts.h"

static int print_ids(const char *path, unsigned flags) {
    struct err e = {0};
    struct gguf *g = NULL;
    struct tokenizer *t = NULL;
    size_t path_n = strlen(path);
    int64_t start = clock_ns();
    int rc;
    if (path_n > 5 && !strcmp(path + path_n - 5, ".gguf")) {
        rc = gguf_open(&g, path, &e);
        if (!rc) rc = tokenizer_open_gguf(&t, g, &e);
    } else {
        rc = tokenizer_open_hf(&t, path, &e);
    }
    if (rc) {
        fprintf(stderr, "%s: %s\n", path, e.message);
        return 1;
    }
    fprintf(stderr, "%s: %d tokens, fingerprint %016llx, opened in %.0f ms\n", path,
            tokenizer_n_tokens(t), (unsigned long long)tokenizer_fingerprint(t),
            clock_ms_since(start));
    char *line = NULL;
    size_t cap = 0;
    ssize_t n;
    double ms = 0;
    long long n_tokens = 0, n_bytes = 0;
    while ((n = getdelim(&line, &cap, 0, stdin)) > 0) {
        if (line[n - 1] == 0) n--;
        struct tokens ids = {0};
        start = clock_ns();
        if (tokenizer_encode(t, line, (size_t)n, flags, &ids, &e)) {
            fprintf(stderr, "%s\n", e.message);
            return 1;
        }
        ms += clock_ms_since(start);
        for (size_t i = 0; i < ids.n; i++) printf(i ? " %d" : "%d", ids.ids[i]);
        printf("\n");
        n_tokens += (long long)ids.n;
        n_bytes += n;
        tokens_deinit(&ids);
    }
    fprintf(stderr, "%lld bytes to %lld tokens in %.0f ms\n", n_bytes, n_tokens, ms);
    free(line);
    tokenizer_close(t);
    gguf_close(g);
    return 0;
}

static int print_family(void) {
    static char text[1 << 20];
    struct err e = {0};
    const struct chat_family *f;
    size_t n = fread(text, 1, sizeof text, stdin);
    int rc = chat_family_detect(&f, text, n, &e);
    printf("%s\n", rc ? e.message : chat_family_name(f));
    return rc ? 1 : 0;
}

int main(int argc, char **argv) {
    if (argc >= 3 && !strcmp(argv[1], "ids")) {
        unsigned flags = 0;
        for (int i = 3; i < argc; i++) {
            if (!strcmp(argv[i], "special")) flags |= TOKENIZER_PARSE_SPECIAL;
            if (!strcmp(argv[i], "bos")) flags |= TOKENIZER_ADD_SPECIAL;
        }
        return print_ids(argv[2], flags);
    }
    if (argc == 3 && !strcmp(argv[1], "texts")) {
        char buf[TEXTS_MAX_BYTES];
        for (unsigned i = 0, n = (unsigned)strtoul(argv[2], NULL, 10); i < n; i++) {
            fwrite(buf, 1, texts_make(i, buf), stdout);
            putchar(0);
        }
        return 0;
    }
    if (argc == 2 && !strcmp(argv[1], "family")) return print_family();
    fprintf(stderr, "usage: tool_tokenize ids PATH [special] [bos] | texts COUNT | family\n");
    return 2;
}
