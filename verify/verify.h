#ifndef TANDEM_VERIFY_H
#define TANDEM_VERIFY_H

/* What may be emitted: the request's sampling settings and their ranges, and the text side of a
 * stream (UTF-8 safe decoding, stop strings across token borders). Acceptance of draft tokens joins
 * them here. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/strbuf.h"
#include "kernels/kernels.h"
#include "model/model.h"

struct err;

enum {
    VERIFY_MAX_STOPS = 16,
    VERIFY_MAX_STOP_BYTES = 256,
    VERIFY_MAX_TOKEN_BYTES =
        4096, /* of one token's text: what the tokenizer lets into a vocabulary */
};

enum { VERIFY_DRAFT_AUTO = -1, VERIFY_DRAFT_DEFAULT = -2 };

/* VERIFY_LOSSLESS keeps the law: accept by min(1, p / q), residual on rejection (the tokens may
 * depend on the draft length). VERIFY_GUMBEL keeps the tokens: both draw by the same noise, so one
 * seed gives one text with speculation or without. */
enum verify_coupling { VERIFY_LOSSLESS, VERIFY_GUMBEL };

/* Sampling settings of one request; verify_params_default fills the defaults. */
struct verify_params {
    double temperature;        /* 0..100, default 1; 0 is greedy */
    int top_k;                 /* 0 (off)..vocab; larger values mean off */
    double top_p;              /* (0, 1], default 1 */
    double min_p;              /* [0, 1], default 0 */
    double repetition_penalty; /* [0.01, 100], default 1: below it logits would overflow */
    double presence_penalty;   /* [-2, 2], default 0 */
    double frequency_penalty;  /* [-2, 2], default 0 */
    bool has_seed;             /* false: the engine draws one, reported in `done` */
    uint64_t seed;
    int logprobs;                  /* -1 none (default), 0..KERN_MAX_LOGPROBS alternatives */
    int max_tokens;                /* -1: the engine's default */
    int draft_tokens;              /* VERIFY_DRAFT_DEFAULT (the engine's), VERIFY_DRAFT_AUTO, 0
                                      (off)..KERN_MAX_DRAFT: draft tokens a round; more than
                                      the engine makes room for is refused */
    enum verify_coupling coupling; /* how draft and target share chance where temperature > 0 */
    bool draft_model; /* the draft model may propose; default on */
    bool lookup;      /* n-grams of prompt and answer may propose too; default on */
    int min_tokens;                /* 0..max_tokens: end tokens are banned before */
    bool ignore_eos;
    int n_stops;
    struct verify_stop {
        int n; /* bytes, 1..VERIFY_MAX_STOP_BYTES, valid UTF-8 */
        char text[VERIFY_MAX_STOP_BYTES];
    } stops[VERIFY_MAX_STOPS];
};

void verify_params_default(struct verify_params *p);

/* Every range above; NaN is out of every range. E_RANGE with name, value and range. */
int verify_params_check(const struct verify_params *p, struct err *e);
/* One of these ranges, for whoever reads it from text: VERIFY_DRAFT_*, 0..KERN_MAX_DRAFT. */
int verify_draft_tokens_check(long long n, struct err *e);

/* "lossless", "gumbel"; "?" for a number outside the enum. The name need not end in NUL; E_RANGE
 * names what is allowed. */
const char *verify_coupling_name(enum verify_coupling c);
int verify_coupling_parse(enum verify_coupling *out, const char *s, size_t n, struct err *e);

/* ---- Text of a stream ----
 * Turns committed tokens into text that may be shown now: holds back an incomplete UTF-8 tail (at
 * most 3 bytes; invalid bytes are passed on) and the longest suffix that is a proper prefix of a
 * stop string, no more. A pure function of the tokens: the engine runs one to know when a stop
 * string ends the answer, the server runs another over the same tokens to make the text (with the
 * same `special`, or they disagree about stops). The stop that counts is the one whose last byte
 * comes first; among several that end there, the longest. Where tokens were cut makes no
 * difference. Linear time: each byte costs amortised constant time a stop string (the failure
 * function of Knuth, Morris and Pratt, 1977). Plain struct, no heap once opened. */
struct verify_text {
    const struct tokenizer *tokenizer;
    const struct verify_params *params; /* stops; must outlive this */
    bool special;                       /* show control tokens */
    bool first;                         /* nothing decoded yet (SentencePiece's first space) */
    bool stopped;                       /* a stop string was found: later tokens are ignored */
    int stop_idx;                       /* which one; -1: none */
    struct strbuf held;                 /* bytes not yet released */
    int n_matched[VERIFY_MAX_STOPS];    /* bytes of each stop that the text so far ends in */
    uint8_t border[VERIFY_MAX_STOPS][VERIFY_MAX_STOP_BYTES]; /* [i][k]: longest proper border of the
                                           first k + 1 bytes of stop i */
};

/* Reserves the hold-back buffer (stop length + longest token), so that verify_text_push on a `sink`
 * with room never allocates. tokenizer may be NULL where only verify_text_push_bytes is used.
 * E_NOMEM. */
int verify_text_init(struct verify_text *t, const struct tokenizer *tokenizer,
                     const struct verify_params *params, bool special, struct err *e);

/* Take one committed token; bytes that may be shown are appended to `sink` (NULL: dropped). Returns
 * true when a stop string was completed: text from the stop on is never shown. */
bool verify_text_push(struct verify_text *t, int token, struct strbuf *sink);

/* The same for text that comes as bytes: the part of it that knows no tokenizer. */
bool verify_text_push_bytes(struct verify_text *t, const char *bytes, size_t n,
                            struct strbuf *sink);

/* Go on from where `from` stands, to look ahead of it: both were made by verify_text_init for the
 * same settings. Allocates nothing. */
void verify_text_copy(struct verify_text *to, const struct verify_text *from);

/* End of stream: release what is held (after a stop: nothing). */
void verify_text_finish(struct verify_text *t, struct strbuf *sink);
void verify_text_deinit(struct verify_text *t);

#endif
