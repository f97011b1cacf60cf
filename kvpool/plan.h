#ifndef TANDEM_KVPOOL_PLAN_H
#define TANDEM_KVPOOL_PLAN_H

/* The memory plan: what a model, or a draft and a target together, will reserve, byte by byte, and
 * what fits then. A pure function of numbers that the model and engine layers supply, so `tandem
 * plan` (from headers alone) and the start of a server run the same code; what it says about the
 * pool is what kvpool_open does, to the byte. A struct plan is a value: it points nowhere. */

#include <stdbool.h>
#include <stddef.h>

#include "kvpool/kvpool.h"

struct err;
struct strbuf;

enum { PLAN_MAX_EXTRA = 12, PLAN_MAX_LINES = 24, PLAN_MAX_ADVICE = 8 };

enum plan_place { PLAN_DEVICE, PLAN_HOST };

/* What the bytes of a line grow with: which option makes them smaller. */
enum plan_knob {
    PLAN_KNOB_NONE,
    PLAN_KNOB_ROWS, /* rows of a step */
    PLAN_KNOB_SEQS, /* sequences at once */
    PLAN_KNOB_DRAFT /* goes away without the draft */
};

struct plan_item {
    const char *name; /* up to 31 bytes are kept */
    size_t bytes;
    enum plan_place place;
    enum plan_knob knob;
    const char *note; /* NULL, or up to 95 bytes */
};

struct plan_input {
    size_t target_weight_bytes, draft_weight_bytes; /* on the device, as they lie there */
    size_t workspace_bytes;  /* activations of the largest step (grows with rows) */
    size_t logits_bytes;     /* target logits of all rows that are sampled (grows with sequences) */
    size_t draft_prob_bytes; /* draft probabilities kept for acceptance */
    size_t host_bytes;       /* tokenizer, requests, sessions: without the pool's own bookkeeping */
    size_t margin_bytes;     /* left to others; not used, but not given to the pool either */
    struct plan_item extra[PLAN_MAX_EXTRA]; /* whatever else is reserved; name NULL ends the list */

    /* Shapes, guarantees, max_seqs, max_blocks. arena_bytes 0: what the budget leaves.
     * max_cached -1: one node for each block that the arena holds. */
    struct kvpool_options pool;
    size_t max_arena_bytes; /* of an arena taken from the budget; 0: no limit */
    size_t budget_bytes; /* device memory that may be used in all; 0: unknown, nothing is checked */
    bool device_is_host; /* one memory: host lines count against the budget too */
    int context;         /* tokens of the longest sequence, prompt and answer */
    int lookahead;       /* tokens reserved beyond it: draft length + 1, or 0 */
    int max_rows;        /* rows of a step, for the advice */
};

struct plan_line {
    char name[32], note[96];
    size_t bytes;
    enum plan_place place;
    enum plan_knob knob;
};

struct plan {
    struct plan_line lines[PLAN_MAX_LINES];
    int n_lines;
    size_t device_bytes, host_bytes; /* sums of the lines */
    size_t budget_bytes, margin_bytes;
    bool device_is_host;

    struct kvpool_options pool; /* open this one: arena_bytes (whole extents), max_cached set */
    struct kvpool_geometry geometry; /* zero where no pool fits */
    size_t pool_host_bytes;          /* kvpool_host_bytes(&pool) */
    bool with_draft;
    int context, lookahead;

    long long tokens_fit; /* of all sequences together, whole blocks */
    int largest_context;  /* of one sequence alone, without the look-ahead */
    int context_for_all;  /* with max_seqs sequences at once, each of the same length */
    int seqs_at_context;  /* at most max_seqs */
    bool fits;            /* the budget holds, and one sequence of `context` tokens fits */
    char advice[PLAN_MAX_ADVICE][240];
    int n_advice;
};

/* Fill *out. A plan that does not fit is an answer, not an error: out->fits is false and the advice
 * says which option to set to which value. E_RANGE for numbers that make no sense (no layers, no
 * sequences, neither arena nor budget, sums that overflow). */
int plan_make(struct plan *out, const struct plan_input *in, struct err *e);

/* 0 where the plan fits, else E_FULL with the first advice as text. For a server's start. */
int plan_check(const struct plan *p, struct err *e);

/* The largest context that n_seqs sequences can have at once; 0: none. */
int plan_context_for(const struct plan *p, int n_seqs);

/* How many sequences of `context` tokens fit at once, whatever max_seqs is. */
int plan_seqs_for(const struct plan *p, int context);

/* Smallest arena found (within 2 %) in which n_seqs sequences of `context` tokens fit; 0: beyond
 * what a pool can address. */
size_t plan_arena_for(const struct plan *p, int n_seqs, int context);

/* A table for people: one line a reservation, then what fits, then advice. Lines end in '\n'. */
void plan_render_text(const struct plan *p, struct strbuf *out);

/* The same as one JSON object. */
void plan_render_json(const struct plan *p, struct strbuf *out);

#endif
