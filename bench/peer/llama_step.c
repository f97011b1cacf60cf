/* The peer's side of bench/peer.py: answers points "class:rows:depth" on stdin with milliseconds,
 * as bench_step
 * --serve does, but through llama.cpp's public API (llama.h). Also `--logits IDS OUT`: the logits
 * of the last position of each prompt in a file of ids, for bench/peer_kl.py. Not part of the
 * product's build; bench/peer.py compiles it against an installed llama.cpp.
 *
 *   llama_step MODEL THREADS FLASH(0|1) EXTRA_BUFFERS(0|1) KV(f16|q8_0) [--logits IDS OUT] */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "llama.h"

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static void quiet(enum ggml_log_level level, const char *text, void *arg) {
    (void)level, (void)text, (void)arg;
}

static int run(struct llama_context *ctx, struct llama_batch *b, const int32_t *ids, int at, int n,
               int n_logits) {
    b->n_tokens = n;
    for (int i = 0; i < n; i++) {
        b->token[i] = ids[i];
        b->pos[i] = at + i;
        b->n_seq_id[i] = 1;
        b->seq_id[i][0] = 0;
        b->logits[i] = i >= n - n_logits;
    }
    return llama_decode(ctx, *b);
}

static int fill(struct llama_context *ctx, struct llama_batch *b, const int32_t *ids, int from,
                int to) {
    while (from < to) {
        int n = to - from < 512 ? to - from : 512;
        if (run(ctx, b, ids + from, from, n, 0)) return -1;
        from += n;
    }
    return 0;
}

static int logits(struct llama_context *ctx, struct llama_batch *b, int vocab, const char *in,
                  const char *out) {
    FILE *f = fopen(in, "rb"), *g = fopen(out, "wb");
    if (!f || !g) return 1;
    int32_t n, ids[8192];
    while (fread(&n, 4, 1, f) == 1 && n > 0 && n <= 8192 &&
           fread(ids, 4, (size_t)n, f) == (size_t)n) {
        llama_memory_seq_rm(llama_get_memory(ctx), -1, -1, -1);
        if (fill(ctx, b, ids, 0, n - 1) || run(ctx, b, ids + n - 1, n - 1, 1, 1)) return 1;
        fwrite(llama_get_logits_ith(ctx, 0), 4, (size_t)vocab, g);
    }
    fclose(f);
    return fclose(g) != 0;
}

int main(int argc, char **argv) {
    if (argc < 6) return 2;
    int threads = atoi(argv[2]);
    llama_log_set(quiet, NULL);
    llama_backend_init();
    struct llama_model_params mp = llama_model_default_params();
    mp.use_extra_bufts = atoi(argv[4]) != 0;
    struct llama_model *model = llama_model_load_from_file(argv[1], mp);
    if (!model) return 1;
    struct llama_context_params cp = llama_context_default_params();
    cp.n_ctx = 8192;
    cp.n_batch = 512;
    cp.n_ubatch = 512;
    cp.n_threads = threads;
    cp.n_threads_batch = threads;
    cp.flash_attn_type =
        atoi(argv[3]) ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    if (!strcmp(argv[5], "q8_0")) cp.type_k = cp.type_v = GGML_TYPE_Q8_0;
    else if (strcmp(argv[5], "f16") != 0) return 2;
    struct llama_context *ctx = llama_init_from_model(model, cp);
    if (!ctx) return 1;
    int vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    struct llama_batch b = llama_batch_init(512, 0, 1);
    if (argc == 9 && !strcmp(argv[6], "--logits")) return logits(ctx, &b, vocab, argv[7], argv[8]);
    int32_t ids[8192];
    for (int i = 0; i < 8192; i++)
        ids[i] = 100 + (int)((unsigned)i * 2654435761u % (unsigned)(vocab - 200));
    char line[64], kind[8];
    int rows, depth, length = 0;
    while (fgets(line, sizeof line, stdin)) {
        if (sscanf(line, "%7[a-z]:%d:%d", kind, &rows, &depth) != 3 || rows > 512) return 2;
        if (length > depth) llama_memory_seq_rm(llama_get_memory(ctx), 0, depth, -1);
        else if (fill(ctx, &b, ids, length, depth)) return 1;
        length = depth;
        llama_synchronize(ctx);
        double start = now_ms();
        if (run(ctx, &b, ids + depth, depth, rows, kind[0] == 'p' ? 1 : rows)) return 1;
        llama_synchronize(ctx);
        printf("%.4f\n", now_ms() - start);
        fflush(stdout);
        llama_memory_seq_rm(llama_get_memory(ctx), 0, depth, -1);
    }
    return 0;
}
