#ifndef TANDEM_TESTS_DISTILL_BED_H
#define TANDEM_TESTS_DISTILL_BED_H

/* What `tandem distill` works on, over the tiny model: the model, its tokenizer, two texts. */

#include "cmd/distill.h"
#include "tests/tiny_model.h"

enum { LAYERS = 5, HIDDEN = 64, WINDOW = 1024, TEXT = 9000 /* bytes */ };

struct tiny_options distill_bed_target(void);

/* A file of n bytes of made-up sentences; static buffers, two in turn. */
const char *distill_bed_file(const char *name, uint64_t seed, int n);

struct distill_bed {
    struct kern *k;
    struct model *m;
    struct tokenizer *tokenizer;
    const struct chat_family *chat;
};

void distill_bed_open(struct distill_bed *b);
void distill_bed_close(struct distill_bed *b);

/* Windows of WINDOW tokens with 9 questions, some inside answers; close them before the bed. */
void distill_bed_texts(struct distill_texts *t, const struct distill_bed *b);

#endif
