#ifndef TANDEM_TARGET_TRAIN_H
#define TANDEM_TARGET_TRAIN_H

/* Training of block scorers from what a dense target was seen to attend to: labels from attention
 * masses, samples of windows, the optimiser, and recall on windows that were held out. The model is
 * never touched. Everything here runs on the CPU's threads and gives the same bits for any number
 * of them, on one machine's instruction set. docs/distill.md has it in words. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/kernels.h"
#include "target/trace.h"

struct err;
struct threads;

/* ---- Labels ---- */

enum target_label {
    TARGET_LABEL_LAST,        /* the last layer, mean over heads */
    TARGET_LABEL_DEEP,        /* mean over all deep layers and heads */
    TARGET_LABEL_STRONGEST,   /* of each block the mean of its eight largest (deep layer, head) */
    TARGET_LABEL_ACCUMULATED, /* the last layer, summed over the queries of a whole text */
    TARGET_N_LABELS
};
enum { TARGET_STRONGEST = 8 };
const char *target_label_name(enum target_label l);
/* E_RANGE names what is allowed. */
int target_label_parse(enum target_label *out, const char *s, struct err *e);

/* What a look's rows paid to blocks 0..n_blocks - 1, a mean over rows; deep layers are those from
 * select_layer on (at least m->first_layer). ACCUMULATED: the sum over rows instead, to be added up
 * by the caller. */
void target_label_of(enum target_label l, const struct target_masses *m, int select_layer,
                     int n_blocks, float *out);

/* ---- Samples ---- */

enum {
    TARGET_MAX_PLACES = 64, /* of a window */
    TARGET_MAX_TRAIN_BLOCKS = 4096,
    TARGET_MAX_DOMAINS = 32,
};

/* A prefix of a window, its newest states and what came after it. */
struct target_place {
    int n_tokens;
    int n_queries; /* 1..KERN_STATE_QUERIES */
    int first, n;  /* blocks that a selection decides on: neither pinned nor partly filled */
    float *query;  /* [n_queries][H] normed, the newest last */
    float *label[TARGET_N_LABELS]; /* [n] each; NULL: the window does not have it */
    float *mark;     /* [n] share of the asked fact that stands in a block; zeros: none is known */
    float *observed; /* [n] what `observed` would have seen; NaN where nobody looked */
};

/* One text as one select layer sees it. */
struct target_window {
    int domain, source; /* source: the text's own domain where `domain` is the made prompts' */
    bool is_held_out;
    int n_blocks;    /* full ones */
    unsigned labels; /* bit 1 << enum target_label: places have it */
    bool has_quarters;
    float *rep;     /* [n_blocks][H] normed representatives */
    float *quarter; /* [4 n_blocks][H] normed, where has_quarters */
    int n_places;
    struct target_place place[TARGET_MAX_PLACES];
    float *floats; /* all of the above, heap */
    size_t n_floats;
};

/* Room for the window's arrays by its counts (places' n_queries and n, n_blocks) and labels.
 * E_NOMEM.
 */
int target_window_alloc(struct target_window *w, int hidden, struct err *e);
void target_window_free(struct target_window *w); /* safe on a zeroed struct */

/* x[n] becomes (x - mean) / sqrt(variance + 1e-5), as kern_scorer's `normed` has it. */
void target_norm(float *x, int n);

/* Fill rep and quarter from a plane (kern_plane: sums of quarters, then the first state where
 * by_first), a block at a time. */
void target_window_represent(struct target_window *w, const float *plane, int hidden,
                             bool has_first, bool by_first);

/* What a file of windows holds of each text. */
struct target_samples_content {
    int n_layers, layer[MODEL_MAX_TAPS]; /* ascending; a window of each */
    unsigned labels;
    bool has_quarters;
    int n_queries; /* of a place, at most */
};

/* A file of windows, each with a checksum, as they are traced. Open for appending behind what is
 * whole and fits `key`, which names everything else that decides the windows; *n_have windows of
 * the layers asked for are read through `take`, by their place in content->layer, which owns the
 * window then. A file may hold more than `content` asks for, so that trainings of different kinds
 * share it; then nothing can be appended. Windows come in groups (of a text's layers), and the end
 * of a group that is torn is cut off; E_INVALID where the file is of another key or holds less than
 * is asked for. path NULL: nothing is kept, appending does nothing. */
struct target_samples;
int target_samples_open(struct target_samples **out, const char *path, uint64_t key, int hidden,
                        const struct target_samples_content *content,
                        int (*take)(void *arg, int layer_idx, struct target_window *w,
                                    struct err *e),
                        void *arg, int *n_have, struct err *e);
int target_samples_append(struct target_samples *s, int layer_idx, const struct target_window *w,
                          struct err *e);
void target_samples_close(struct target_samples *s); /* NULL: nothing */

/* ---- Training ---- */

enum target_loss {
    TARGET_LOSS_KL,       /* KL of softmax(score) to the label */
    TARGET_LOSS_BCE,      /* cross-entropy of "among the best by label" */
    TARGET_LOSS_BCE_RANK, /* that, and each of them above each other block */
    TARGET_N_LOSSES
};
const char *target_loss_name(enum target_loss l);
int target_loss_parse(enum target_loss *out, const char *s, struct err *e);

struct target_train_shape {
    enum kern_score kind; /* LATE or MLP */
    enum target_loss loss;
    int hidden;
    int n_heads, head_dim; /* LATE */
    int width;             /* MLP */
    bool has_layernorm;    /* MLP */
};

struct target_train_options {
    struct target_train_shape shape;
    int n_steps, n_warmup;
    int batch; /* windows a step */
    enum target_label label;
    double aim;    /* [0, 1]: so much of a marked place's label is its mark */
    int n_queries; /* newest of a place's that ask; 0: all */
    double learning_rate, weight_decay;
    double keep; /* share of a prefix's blocks that counts as the best (BCE) */
    uint64_t seed;
};

struct target_train;

/* windows[n]: those that are held out are passed over; they must outlive it. E_INVALID where none
 * is left to train on. */
int target_train_open(struct target_train **out, const struct target_train_options *o,
                      const struct target_window *const *windows, int n, struct threads *threads,
                      struct err *e);
void target_train_close(struct target_train *t);

int target_train_steps_done(const struct target_train *t);
/* One step; *loss (NULL) of its batch. False after the last. */
bool target_train_step(struct target_train *t, double *loss);

/* Scores of a window's places, f32 [n_places][n_blocks], by the parameters as they are. */
void target_train_score(struct target_train *t, const struct target_window *w, float *out);

/* Weights in kern_scorer's layout into the caller's arrays (NULL: not wanted): LATE a, b
 * [heads * head_dim][H]; MLP w1 [W][2H], b1 [W], w2 [W], b2 [1], ln_weight, ln_bias [2H]. */
struct target_train_weights {
    float *a, *b, *w1, *b1, *w2, *b2, *ln_weight, *ln_bias;
};
void target_train_weights(const struct target_train *t, const struct target_train_weights *out);

/* A number for everything that decides the training; `key` names what it is trained on. */
uint64_t target_train_key(const struct target_train *t, uint64_t key);

/* Everything that goes on from here, to a file (written beside it and renamed) and back. `key`
 * as above; E_INVALID where the file is of another. */
int target_train_save(const struct target_train *t, const char *path, uint64_t key, struct err *e);
int target_train_restore(struct target_train *t, const char *path, uint64_t key, struct err *e);

/* ---- Recall ---- */

/* best[n] is 1 at the n_best largest of x[n], 0 elsewhere; equal ones by number, the lower first.
 * n is at most TARGET_MAX_TRAIN_BLOCKS. */
void target_best(const float *x, int n, int n_best, uint8_t *best);

/* Of the n_best largest of label[n] (ties: the lower), the share among the n_best largest of
 * score[n]; *mass (NULL) the share of all of the label that those hold. */
double target_recall(const float *score, const float *label, int n, int n_best, double *mass);

#endif
