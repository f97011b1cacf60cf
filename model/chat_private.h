#ifndef TANDEM_MODEL_CHAT_PRIVATE_H
#define TANDEM_MODEL_CHAT_PRIVATE_H

/* Shared by chat.c (detection, the way from marks and text to ids) and chat_families.c (what each
 * family writes). */

#include "model/chat.h"
#include "model/tokenizer_private.h"

/* One call of chat_render. Text is gathered between marks and encoded in one piece, as the model's
 * own tokenizer would cut the finished string at its special tokens. The first error stays. */
struct chat_writer {
    const struct chat_family *family;
    const struct tokenizer *t;
    struct tokens *out;
    struct strbuf text; /* not yet encoded */
    bool any;           /* something was encoded or pushed before `text` */
    int rc;
    struct err *e;
};

/* Text bytes [begin, end) of a message. */
struct chat_span {
    const char *s;
    size_t n;
};

typedef void chat_render_fn(struct chat_writer *w, const struct chat_message *m, size_t n,
                            bool add_generation_prompt);

struct chat_family {
    const char *name;
    chat_render_fn *render;
    const char *default_system; /* NULL: none */
    bool bos;                   /* ChatML: a bos in front */
};

/* The table, ending in a zero entry. */
extern const struct chat_family chat_families[];

/* Plain text. */
void chat_text(struct chat_writer *w, const char *s);
void chat_span(struct chat_writer *w, struct chat_span s);

/* A special token that the tokenizer must have. */
void chat_mark(struct chat_writer *w, const char *name);

/* The same where older tokenizers of the family spell it in text. */
void chat_mark_or_text(struct chat_writer *w, const char *name);

void chat_bos(struct chat_writer *w);
void chat_eos(struct chat_writer *w);

/* E_INVALID, once. */
void chat_invalid(struct chat_writer *w, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));

bool chat_role_is(const struct chat_message *m, const char *role);
struct chat_span chat_content(const struct chat_message *m);

/* Without white space at both ends (Python's strip). */
struct chat_span chat_trim(struct chat_span s);

#endif
