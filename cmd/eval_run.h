#ifndef TANDEM_CMD_EVAL_RUN_H
#define TANDEM_CMD_EVAL_RUN_H

/* What an evaluation measures: needles found, loss of running text with recall and attention, tasks
 * from files. Each goes through its inputs in an order that leaves what was asked balanced wherever
 * the time ends, and gives one item an input with a number a column; reports add them up. */

#include <stdio.h>

#include "base/log.h"
#include "cmd/eval_bed.h"

enum {
    EVAL_MAX_LENGTHS = 8,
    EVAL_MAX_DEPTHS = 11,
    EVAL_PARTS = 8,      /* of the text behind a prompt, whose loss is told apart */
    EVAL_SHARES = 3,     /* 5, 10 and 20 % of the blocks */
    EVAL_SIZES = 4,      /* blocks of 16, 32, 64 and 128 tokens */
    EVAL_FOLLOWING = 512 /* most tokens behind a prompt */
};
extern const double eval_share[EVAL_SHARES];

/* Time, and a line that shows it. */
struct eval_clock {
    long long start_ns, budget_ns; /* of the whole evaluation; 0: no limit */
};
bool eval_clock_is_up(const struct eval_clock *c);

/* ---- Needles ---- */

struct eval_find_options {
    int n_lengths, length[EVAL_MAX_LENGTHS]; /* tokens of a prompt */
    int n_depths;
    double depth[EVAL_MAX_DEPTHS];
    int n_kinds;
    enum eval_needle_kind kind[EVAL_N_NEEDLE_KINDS];
    int n;        /* of each length */
    int n_answer; /* tokens */
    int n_late;   /* tokens of the answer in front of a late fact */
    uint64_t seed;
    FILE *answers; /* a JSON line a prompt; NULL: none */
};
enum { EVAL_QUESTION_TOKENS = 64 }; /* most of a late fact's beginning */

struct eval_found {
    int length, depth; /* indexes */
    enum eval_needle_kind kind;
    int text, n_tokens;
    bool right[EVAL_MAX_COLUMNS];
    int n_kept[EVAL_MAX_COLUMNS], n_blocks;
};

/* items[o->n * n_lengths], filled up to *n_items. */
int eval_find(struct eval_bed *b, const struct eval_columns *columns,
              const struct eval_texts *texts, const struct eval_find_options *o,
              const struct eval_clock *clock, struct eval_found *items, int *n_items,
              struct err *e);

/* The tokens of the i-th of these prompts. */
int eval_find_prompt(struct eval_bed *b, const struct eval_texts *texts,
                     const struct eval_find_options *o, int i, struct tokens *out, struct err *e);

/* ---- Running text ---- */

struct eval_read_options {
    int n_lengths, length[EVAL_MAX_LENGTHS];
    int n;           /* texts of each length */
    int n_following; /* tokens behind, 64..EVAL_FOLLOWING */
    uint64_t seed;
};

struct eval_loss {
    int length, text;
    int n_part[EVAL_PARTS];                   /* tokens */
    double nll[EVAL_MAX_COLUMNS][EVAL_PARTS]; /* sums, nats */
    int n_agree[EVAL_MAX_COLUMNS];            /* most likely tokens that are dense's */
    double recall[EVAL_MAX_COLUMNS];          /* see eval_recall */
    double mass[EVAL_MAX_COLUMNS];            /* share of attention on kept blocks */
    int n_kept[EVAL_MAX_COLUMNS], n_blocks;
};

/* Sums over the texts of one length of what attention does in the deep layers, dense. */
struct eval_attention {
    int n;      /* texts */
    int n_best; /* blocks that `overlap` compares */
    int n_layers;
    double top[MODEL_MAX_LAYERS][EVAL_SHARES]; /* share that a head's best blocks hold */
    double overlap[MODEL_MAX_LAYERS]; /* of the first deep layer's best blocks with the layer's */
    /* Attention that the best blocks of 16, 32, 64 and 128 tokens hold, as many tokens of each; the
     * first two 0 where nobody asked of quarters. */
    double by_size[EVAL_SIZES];
};

int eval_read(struct eval_bed *b, const struct eval_columns *columns,
              const struct eval_texts *texts, const struct eval_read_options *o,
              const struct eval_clock *clock, struct eval_loss *items, int *n_items,
              struct eval_attention attention[EVAL_MAX_LENGTHS], struct err *e);

/* Of the best blocks by `truth`, as many as kept[n_kept] has beside the pinned ones (the first and
 * the newest n_window of n_blocks), the share that is kept; 1 where none are wanted. */
double eval_recall(const float *truth, int n_blocks, const int32_t *kept, int n_kept, int n_window);

/* ---- Tasks from files ---- */

enum { EVAL_TASK_F1, EVAL_TASK_ROUGE_L, EVAL_TASK_EXACT, EVAL_N_TASK_SCORES };

struct eval_task_options {
    const char *paths; /* files of JSON lines, commas between */
    int n;             /* most of each file; 0: all */
    int n_answer;      /* tokens */
    uint64_t seed;
    FILE *answers;
};
struct eval_task {
    char dataset[48];
    int n_tokens; /* of the prompt */
    bool is_cut;  /* its middle was left out */
    double score[EVAL_MAX_COLUMNS][EVAL_N_TASK_SCORES];
    int n_kept[EVAL_MAX_COLUMNS], n_blocks;
};
enum { EVAL_MAX_TASKS = 20000 };

/* Read all lines that would be asked (n of each file; 0: all), so that a bad one is named before
 * the work begins; a file without any is an error. */
int eval_tasks_check(const char *paths, int n, struct err *e);

/* *items is the caller's to free. */
int eval_tasks(struct eval_bed *b, const struct eval_columns *columns,
               const struct eval_task_options *o, const struct eval_clock *clock,
               struct eval_task **items, int *n_items, struct err *e);

/* One line of such a file: context, input, answers (strings, or one), dataset and length where it
 * names them. E_FORMAT names what is wrong. Free with eval_task_line_close. */
struct eval_task_line {
    char *context, *input, *dataset;
    int n_answers;
    char *answer[32];
};
int eval_task_line_read(struct eval_task_line *out, const char *line, size_t n, struct err *e);
void eval_task_line_close(struct eval_task_line *t);

/* ---- Shared ---- */

/* A progress line with what is left: "needles 34/200, 3.2 min left". */
struct eval_progress {
    char what[96];
    const char *name;
    long long start_ns;
    int total, done;
    struct log_progress *bar;
};
void eval_progress_start(struct eval_progress *p, struct log_progress *bar, const char *name,
                         int total);
void eval_progress_at(struct eval_progress *p, int done);
void eval_progress_end(struct eval_progress *p);

/* Answers of all columns behind the prompt at hand: text[i] of each, NUL-terminated, up to n tokens
 * behind lead[n_lead], by the lists that eval_bed_select made. */
int eval_answer_all(struct eval_bed *b, const struct eval_columns *columns, const int32_t *lead,
                    int n_lead, int n, struct strbuf text[EVAL_MAX_COLUMNS], struct err *e);
/* The dense answer's tokens, as the oracle needs them: out[n], *n_out. */
int eval_answer_dense(struct eval_bed *b, const int32_t *lead, int n_lead, int n, int32_t *out,
                      int *n_out, struct err *e);
/* End a line of --answers: what stands in s, an open JSON object, then every column's answer, to f.
 * Frees s. */
void eval_write_answers(FILE *f, struct strbuf *s, const struct eval_columns *columns,
                        const struct strbuf *text);

bool eval_columns_have(const struct eval_columns *c, enum eval_selector s);

#endif
