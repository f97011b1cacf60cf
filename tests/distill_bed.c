#include "tests/distill_bed.h"

#include <stdio.h>
#include <unistd.h>

#include "base/err.h"
#include "base/rng.h"
#include "model/source.h"
#include "tests/harness.h"

struct tiny_options distill_bed_target(void) {
    struct tiny_options t;
    tiny_model_default(&t);
    t.n_layers = LAYERS;
    return t;
}

const char *distill_bed_file(const char *name, uint64_t seed, int n) {
    static char path[2][96];
    static int turn;
    char *p = path[turn++ % 2];
    snprintf(p, sizeof path[0], "/tmp/tandem-%d-%s.txt", (int)getpid(), name);
    FILE *f = fopen(p, "w");
    assert_non_null(f);
    for (int i = 0, word = 0; i < n; i++) {
        uint32_t r = rng_u32(seed, 0, RNG_TEST, (uint32_t)i);
        if (word > 2 && r % 5 == 0) {
            fputs(r % 7 == 0 ? ". " : " ", f);
            word = 0;
        } else {
            fputc('a' + (int)(r >> 8) % 26, f);
            word++;
        }
    }
    fclose(f);
    return p;
}

void distill_bed_open(struct distill_bed *b) {
    struct tiny_options t = distill_bed_target();
    struct target_trace_options o = {.max_tokens = WINDOW + TARGET_TRACE_LOOK};
    struct model_caps caps = target_trace_caps(&o);
    struct kern_options ko = {.n_threads = 1};
    struct model_source *src;
    struct err e = {0}, why = {0};
    const char *path = tiny_model_file(&t);
    size_t n;
    *b = (struct distill_bed){0};
    assert_ok(kern_cpu_open(&b->k, &ko, &e), e);
    assert_ok(model_source_open(&src, path, &e), e);
    unlink(path);
    assert_ok(model_open(&b->m, src, NULL, b->k, &caps, NULL, NULL, &e), e);
    assert_ok(model_open_tokenizer(&b->tokenizer, src, &e), e);
    const char *text = model_source_chat_template(src, &n);
    if (!text || chat_family_detect(&b->chat, text, n, &why) != 0) b->chat = NULL;
    model_source_close(src);
}

void distill_bed_close(struct distill_bed *b) {
    tokenizer_close(b->tokenizer);
    model_close(b->m);
    b->k->ops->close(b->k);
}

void distill_bed_texts(struct distill_texts *t, const struct distill_bed *b) {
    struct err e = {0};
    *t = (struct distill_texts){.tokenizer = b->tokenizer,
                                .chat = b->chat,
                                .window = WINDOW,
                                .n_places = 4,
                                .n_questions = 9,
                                .inside = true,
                                .seed = 3};
    const char *first = distill_bed_file("one", 1, TEXT),
               *second = distill_bed_file("two", 2, TEXT);
    assert_ok(distill_texts_add(t, first, &e), e);
    assert_ok(distill_texts_add(t, second, &e), e);
    unlink(first);
    unlink(second);
}
