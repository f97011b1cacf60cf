#ifndef TANDEM_CMD_DISTILL_H
#define TANDEM_CMD_DISTILL_H

/* Private to `tandem distill`: texts as domains, windows cut from them or made with facts inside,
 * their way through the target, recall of what came of it. docs/distill.md says what and why. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "model/model.h"
#include "target/train.h"

struct err;
struct option;

enum {
    DISTILL_MAX_DOMAINS = TARGET_MAX_DOMAINS - 1, /* the last is the generated prompts' */
    DISTILL_HOLD = 8, /* of so many windows of a domain and kind one is held out */
    DISTILL_MIN_WINDOW = 1024,
    DISTILL_MAX_FACTS = 48, /* put into one prompt */
    DISTILL_QUESTIONS = 3,  /* about one of them */
};

struct distill_domain {
    char name[64];
    struct tokens ids;
    int split; /* tokens before it train, those behind are held out */
};

/* What windows are made from and how. */
struct distill_texts {
    const struct tokenizer *tokenizer;
    const struct chat_family *chat; /* NULL: plain text */
    struct distill_domain domain[DISTILL_MAX_DOMAINS];
    int n_domains;
    int window;
    int n_places;    /* of running text */
    int n_questions; /* of a made prompt, at most */
    bool inside;     /* some of its places lie inside answers */
    uint64_t seed;
};

/* Add a text file as a domain named after it. E_INVALID where its tokens do not make one window to
 * train on and another to hold out, with the numbers. */
int distill_texts_add(struct distill_texts *t, const char *path, struct err *e);
void distill_texts_close(struct distill_texts *t);
/* Of everything that decides window number i. */
uint64_t distill_texts_key(const struct distill_texts *t);
const char *distill_domain_name(const struct distill_texts *t, int domain);

/* A prefix at which blocks are to be scored, and what follows it. */
struct distill_place {
    int n_tokens;        /* of the prefix */
    const int32_t *tail; /* its last tokens, behind the common ones */
    int n_tail;
    const int32_t *next; /* what follows, n_next <= TARGET_TRACE_LOOK */
    int n_next;
    int mark_first, n_mark; /* tokens of the fact that is asked for; n_mark 0: of none */
    int n_lead;             /* the tail's last tokens that are an answer's beginning already */
};

/* Window i: running text (i even), where places lie one behind another, or a prompt with facts,
 * where each place is the prompt with another question and is gone back from. */
struct distill_window {
    int domain, source; /* source: the text's own domain, also of a made prompt's filler */
    bool is_held_out, is_facts;
    int n_common;      /* leading tokens that all places share (facts), or all (text) */
    struct tokens ids; /* the common tokens; of facts, questions and answers behind them */
    int n_places;
    struct distill_place place[TARGET_MAX_PLACES];
};
int distill_window_make(struct distill_window *w, const struct distill_texts *t, int i,
                        struct err *e);
void distill_window_deinit(struct distill_window *w);

/* Draws of one window, counted so that each is another; below 0: 0. */
struct distill_dice {
    uint64_t seed;
    uint32_t window, n;
};
uint32_t distill_roll(struct distill_dice *d, uint32_t below);
int distill_append(struct tokens *out, const int32_t *ids, size_t n, struct err *e);
/* Where n tokens of a domain begin: on the side of its split that the window is on. */
int distill_begin_at(const struct distill_domain *d, bool held_out, int n,
                     struct distill_dice *dice);

/* Fill window w, of which domain and side are set, with a made prompt and its questions. */
int distill_prompt_make(struct distill_window *w, const struct distill_texts *t,
                        struct distill_dice *dice, struct err *e);

/* A sentence and what is asked about it, each question with an answer of its own. */
struct distill_fact {
    char text[320];
    int n_questions;
    char question[DISTILL_QUESTIONS][400], answer[DISTILL_QUESTIONS][320];
    int lead[DISTILL_QUESTIONS]; /* bytes of the answer in front of what was asked for */
};
/* Facts of one prompt, no text or question twice; held_out: of the wordings that are kept for
 * windows that are held out. */
void distill_facts_make(struct distill_fact *f, int n, uint64_t seed, uint32_t idx, bool held_out);

/* ---- Through the target ---- */

struct distill_trace_options {
    bool by_first;
    struct target_samples_content content; /* its layers are the candidates */
};

/* Trace window w and fill out[n_layers] (the caller frees each). */
int distill_trace_window(struct target_trace *t, const struct distill_trace_options *o,
                         const struct distill_window *w, int hidden, struct target_window *out,
                         struct err *e);

/* ---- Recall ---- */

enum distill_selector {
    DISTILL_SCORER,
    DISTILL_MEAN,
    DISTILL_OBSERVED,
    DISTILL_RECENT,
    DISTILL_RANDOM,
    DISTILL_ORACLE,
    DISTILL_N_SELECTORS
};
extern const char *const distill_selector_name[DISTILL_N_SELECTORS];

struct distill_recall {
    int n_places;
    double recall, mass; /* means */
    int n_marked;        /* places whose fact may be lost */
    double mark;         /* mean share of it that is kept */
};
enum { DISTILL_N_KEEPS = 2 };
/* By domain (the last line: all) and how much is kept: a tenth of the blocks, 32 blocks. */
struct distill_table {
    struct distill_recall at[DISTILL_N_KEEPS][TARGET_MAX_DOMAINS + 1][DISTILL_N_SELECTORS];
};
/* Over the held-out ones of windows[n], by one of their labels. */
int distill_table_fill(struct distill_table *out, struct target_train *train,
                       enum target_label label, const struct target_window *const *windows, int n,
                       int hidden, uint64_t seed, struct err *e);
/* One number to choose a layer by: the mean over domains of the mass kept at 32 blocks, or at a
 * tenth where contexts are shorter. */
double distill_table_worth(const struct distill_table *t);

#endif
