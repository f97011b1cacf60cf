/* The training loop: batches of windows to threads, gradients summed in the order of the batch, one
 * AdamW step each. A window's gradient is one thread's work and its own array, so that the bits do
 * not know how many threads there were. */
#include "target/train.h"

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <xxhash.h>

#include "base/checked.h"
#include "base/err.h"
#include "base/file.h"
#include "base/rng.h"
#include "base/strbuf.h"
#include "base/threads.h"
#include "target/adamw.h"
#include "target/target.h"
#include "target/train_maths.h"

struct target_train {
    struct target_train_options o;
    const struct train_maths *maths;
    struct threads *threads;
    struct adamw adamw;
    float *arrays; /* param, m, v, grad: n_params each */
    float *grads;  /* [batch][n_params] */
    double *sums, *losses;
    uint8_t *scratch; /* [threads][scratch_bytes] */
    size_t scratch_bytes;
    int max_blocks;
    int n_items;
    struct train_item *items;
    struct train_place *places; /* of all items, one after another */
    float *labels;
    uint8_t *positives;
    int *order, *batch; /* [n_items] this pass over the windows; [batch] this step's */
    long long epoch;    /* that `order` is of, -1: none */
    int n_done;
};

/* ---- Shapes ---- */

size_t target__train_n_params(const struct target_train_shape *s) {
    size_t h = (size_t)s->hidden, w = (size_t)s->width;
    if (s->kind == KERN_SCORE_LATE) return 2 * h * (size_t)(s->n_heads * s->head_dim);
    return 2 * h * w + 2 * w + 1 + (s->has_layernorm ? 4 * h : 0);
}

const struct train_maths *target__train_maths(void) {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl"))
        return &train_maths_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &train_maths_avx2;
    return &train_maths_plain;
}

/* Two draws that are close to normal enough: the sum of four uniforms, scaled to variance 1. */
static float draw(uint64_t seed, uint32_t idx) {
    float sum = 0;
    for (uint32_t i = 0; i < 4; i++) sum += rng_uniform(seed, 0, RNG_TRAIN, 4 * idx + i);
    return (sum - 2.f) * 1.7320508f;
}

/* LATE: both maps the same at first, so that a block scores by its likeness. MLP: as torch's linear
 * layers, the LayerNorm as if it were not there. */
static void init_params(struct target_train *t) {
    const struct target_train_shape *s = &t->o.shape;
    float *p = t->adamw.param;
    size_t h = (size_t)s->hidden, w = (size_t)s->width;
    if (s->kind == KERN_SCORE_LATE) {
        size_t n = h * (size_t)(s->n_heads * s->head_dim);
        float scale = 1.f / sqrtf((float)h);
        for (size_t i = 0; i < n; i++) p[i] = p[n + i] = scale * draw(t->o.seed, (uint32_t)i);
        return;
    }
    float scale = 1.f / sqrtf(6.f * (float)h), scale2 = 1.f / sqrtf(3.f * (float)w);
    for (size_t i = 0; i < 2 * h * w; i++) p[i] = scale * draw(t->o.seed, (uint32_t)i);
    p += 2 * h * w + w;
    for (size_t i = 0; i < w; i++) p[i] = scale2 * draw(t->o.seed + 1, (uint32_t)i);
    for (size_t i = 0; s->has_layernorm && i < 2 * h; i++) p[w + 1 + i] = 1.f;
}

/* ---- Samples ---- */

static double sum_of(const float *x, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += (double)x[i];
    return sum;
}

/* The newest queries of a place that ask. */
static struct train_place asking(const struct target_train *t, const struct target_place *p) {
    int n = t->o.n_queries && t->o.n_queries < p->n_queries ? t->o.n_queries : p->n_queries;
    const float *query = p->query + (size_t)(p->n_queries - n) * (size_t)t->o.shape.hidden;
    return (struct train_place){.query = query, .n_queries = n, .first = p->first, .n = p->n};
}

/* What the place's scores are to be like: the label, some of it the mark, summing to 1. A place
 * without any of it teaches nothing. */
static bool fill_label(const struct target_train *t, const struct target_place *p, float *out) {
    const float *label = p->label[t->o.label];
    double of_label = sum_of(label, p->n), of_mark = sum_of(p->mark, p->n);
    double aim = of_mark > 0 ? t->o.aim : 0;
    if (of_label <= 0) return false;
    for (int b = 0; b < p->n; b++) {
        double x = (1 - aim) * ((double)label[b] / of_label);
        if (aim > 0) x += aim * ((double)p->mark[b] / of_mark);
        out[b] = (float)x;
    }
    return true;
}

static void add_place(struct target_train *t, struct train_item *it, const struct target_place *p,
                      size_t *at) {
    struct train_place *to = (struct train_place *)&it->place[it->n_places];
    float *label = t->labels + *at;
    uint8_t *positive = t->positives + *at;
    int best = (int)ceil(t->o.keep * target_n_blocks(p->n_tokens));
    if (!fill_label(t, p, label)) return;
    *to = asking(t, p);
    to->label = label;
    to->positive = positive;
    target_best(label, p->n, best, positive);
    for (int b = 0; b < p->n; b++) positive[b] = positive[b] && label[b] > 0;
    *at += (size_t)p->n;
    it->n_places++;
}

static int prepare(struct target_train *t, const struct target_window *const *windows, int n,
                   struct err *e) {
    size_t n_places = 0, n_blocks = 0, at = 0, place = 0;
    for (int i = 0; i < n; i++) {
        if (windows[i]->n_blocks > TARGET_MAX_TRAIN_BLOCKS)
            return err_raise(e, E_RANGE, "a window of %d blocks: at most %d can be trained on",
                             windows[i]->n_blocks, TARGET_MAX_TRAIN_BLOCKS);
        if (windows[i]->n_blocks > t->max_blocks) t->max_blocks = windows[i]->n_blocks;
        if (windows[i]->is_held_out) continue;
        n_places += (size_t)windows[i]->n_places;
        for (int p = 0; p < windows[i]->n_places; p++) n_blocks += (size_t)windows[i]->place[p].n;
    }
    t->items = calloc((size_t)n + 1, sizeof *t->items);
    t->places = calloc(n_places + 1, sizeof *t->places);
    t->labels = malloc((n_blocks + 1) * sizeof *t->labels);
    t->positives = malloc(n_blocks + 1);
    t->order = malloc(((size_t)n + 1) * sizeof *t->order);
    if (!t->items || !t->places || !t->labels || !t->positives || !t->order)
        return err_raise(e, E_NOMEM, "no memory for the labels of %zu places", n_places);
    for (int i = 0; i < n; i++) {
        const struct target_window *w = windows[i];
        struct train_item *it = &t->items[t->n_items];
        if (w->is_held_out) continue;
        if ((t->o.shape.kind == KERN_SCORE_LATE && !w->has_quarters) ||
            !(w->labels >> t->o.label & 1))
            return err_raise(e, E_INVALID,
                             "window %d has no %s: it was traced for another training", i,
                             w->labels >> t->o.label & 1 ? "means of quarters" : "such label");
        *it = (struct train_item){.rep = t->o.shape.kind == KERN_SCORE_LATE ? w->quarter : w->rep,
                                  .n_blocks = w->n_blocks,
                                  .place = t->places + place};
        for (int p = 0; p < w->n_places; p++) add_place(t, it, &w->place[p], &at);
        place += (size_t)it->n_places;
        t->n_items += it->n_places > 0;
    }
    return t->n_items ? 0 : err_raise(e, E_INVALID, "no window is left to train on (of %d)", n);
}

/* ---- Opening ---- */

static int reserve(struct target_train *t, struct err *e) {
    size_t n = target__train_n_params(&t->o.shape);
    if (t->o.batch > t->n_items) t->o.batch = t->n_items;
    size_t batch = (size_t)t->o.batch;
    t->scratch_bytes = align_up(t->maths->scratch_bytes(&t->o.shape, t->max_blocks), 64);
    t->arrays = calloc(4 * n, sizeof *t->arrays);
    t->grads = malloc(batch * n * sizeof *t->grads);
    t->sums = malloc(target__adamw_n_runs(n) * sizeof *t->sums);
    t->losses = malloc(batch * sizeof *t->losses);
    t->batch = malloc(batch * sizeof *t->batch);
    t->scratch = aligned_alloc(64, (size_t)threads_n(t->threads) * t->scratch_bytes);
    if (!t->arrays || !t->grads || !t->sums || !t->losses || !t->batch || !t->scratch)
        return err_raise(e, E_NOMEM, "no memory to train %zu parameters", n);
    t->adamw =
        (struct adamw){.n = n,
                       .param = t->arrays,
                       .m = t->arrays + n,
                       .v = t->arrays + 2 * n,
                       .grad = t->arrays + 3 * n,
                       .n_decay = t->o.shape.kind == KERN_SCORE_LATE
                                      ? n
                                      : 2 * (size_t)t->o.shape.hidden * (size_t)t->o.shape.width,
                       .weight_decay = t->o.weight_decay};
    init_params(t);
    return 0;
}

int target_train_open(struct target_train **out, const struct target_train_options *o,
                      const struct target_window *const *windows, int n, struct threads *threads,
                      struct err *e) {
    struct target_train *t = calloc(1, sizeof *t);
    if (!t) return err_raise(e, E_NOMEM, "no memory to train");
    t->o = *o;
    t->threads = threads;
    t->maths = target__train_maths();
    t->epoch = -1;
    int rc = prepare(t, windows, n, e);
    if (!rc) rc = reserve(t, e);
    if (rc) target_train_close(t);
    else *out = t;
    return rc;
}

void target_train_close(struct target_train *t) {
    if (!t) return;
    void *all[] = {t->arrays, t->grads,  t->sums,      t->losses, t->scratch, t->items,
                   t->places, t->labels, t->positives, t->order,  t->batch};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    free(t);
}

int target_train_steps_done(const struct target_train *t) {
    return t->n_done;
}

/* ---- A step ---- */

struct job {
    struct target_train *t;
    double weight;
    atomic_int next;
};

static void grad_share(void *arg, int idx, int n_threads) {
    struct job *j = arg;
    struct target_train *t = j->t;
    (void)n_threads;
    for (int i; (i = atomic_fetch_add(&j->next, 1)) < t->o.batch;) {
        struct train_item it = t->items[t->batch[i]];
        it.weight = j->weight;
        t->losses[i] = t->maths->item(&t->o.shape, t->adamw.param, &it,
                                      t->scratch + (size_t)idx * t->scratch_bytes,
                                      t->grads + (size_t)i * t->adamw.n, NULL);
    }
}

static void sum_share(void *arg, int idx, int n_threads) {
    struct target_train *t = ((struct job *)arg)->t;
    int begin, end;
    threads_split((int)target__adamw_n_runs(t->adamw.n), 1, idx, n_threads, &begin, &end);
    size_t n = t->adamw.n, run = n / target__adamw_n_runs(n) + 1;
    size_t first = (size_t)begin * run, stop = (size_t)end * run;
    if (stop > n) stop = n;
    for (size_t i = first; i < stop; i++) t->adamw.grad[i] = t->grads[i];
    for (int b = 1; b < t->o.batch; b++)
        for (size_t i = first; i < stop; i++) t->adamw.grad[i] += t->grads[(size_t)b * n + i];
}

/* The windows of step n_done: pass after pass over all, each in another order. */
static int choose(struct target_train *t) {
    int n_places = 0;
    for (int i = 0; i < t->o.batch; i++) {
        long long at = (long long)t->n_done * t->o.batch + i, epoch = at / t->n_items;
        if (epoch != t->epoch) {
            for (int x = 0; x < t->n_items; x++) t->order[x] = x;
            for (int x = t->n_items - 1; x > 0; x--) {
                uint32_t r = rng_u32(t->o.seed, (uint64_t)epoch + 1, RNG_TRAIN, (uint32_t)x);
                int y = (int)(r % (uint32_t)(x + 1)), swap = t->order[x];
                t->order[x] = t->order[y];
                t->order[y] = swap;
            }
            t->epoch = epoch;
        }
        t->batch[i] = t->order[at % t->n_items];
        n_places += t->items[t->batch[i]].n_places;
    }
    return n_places;
}

bool target_train_step(struct target_train *t, double *loss) {
    if (t->n_done >= t->o.n_steps) return false;
    struct job j = {.t = t, .weight = 1.0 / choose(t)};
    double sum = 0;
    threads_run(t->threads, grad_share, &j);
    threads_run(t->threads, sum_share, &j);
    t->n_done++;
    target__adamw(&t->adamw, t->n_done,
                  target__learning_rate(t->n_done, t->o.n_steps, t->o.n_warmup, t->o.learning_rate),
                  t->sums, t->threads);
    for (int i = 0; i < t->o.batch; i++) sum += t->losses[i];
    if (loss) *loss = sum;
    return true;
}

/* ---- What came of it ---- */

void target_train_score(struct target_train *t, const struct target_window *w, float *out) {
    struct train_place places[TARGET_MAX_PLACES];
    static const uint8_t none[TARGET_MAX_TRAIN_BLOCKS];
    static const float no_label[TARGET_MAX_TRAIN_BLOCKS];
    struct train_item it = {.rep = t->o.shape.kind == KERN_SCORE_LATE ? w->quarter : w->rep,
                            .n_blocks = w->n_blocks,
                            .n_places = w->n_places,
                            .place = places};
    ASSERT(w->n_blocks <= t->max_blocks);
    for (int i = 0; i < w->n_places; i++) {
        places[i] = asking(t, &w->place[i]);
        places[i].label = no_label;
        places[i].positive = none;
    }
    t->maths->item(&t->o.shape, t->adamw.param, &it, t->scratch, NULL, out);
}

/* out[cols][rows] transposed. */
static void transpose(float *out, const float *x, size_t rows, size_t cols) {
    for (size_t i = 0; out && i < rows; i++)
        for (size_t j = 0; j < cols; j++) out[j * rows + i] = x[i * cols + j];
}
static void copy(float *out, const float *x, size_t n) {
    if (out) memcpy(out, x, n * sizeof *x);
}

void target_train_weights(const struct target_train *t, const struct target_train_weights *out) {
    const struct target_train_shape *s = &t->o.shape;
    const float *p = t->adamw.param;
    size_t h = (size_t)s->hidden, d = (size_t)(s->n_heads * s->head_dim), w = (size_t)s->width;
    if (s->kind == KERN_SCORE_LATE) {
        transpose(out->a, p, h, d);
        transpose(out->b, p + h * d, h, d);
        return;
    }
    transpose(out->w1, p, 2 * h, w);
    p += 2 * h * w;
    copy(out->b1, p, w);
    copy(out->w2, p + w, w);
    copy(out->b2, p + 2 * w, 1);
    if (!s->has_layernorm) return;
    copy(out->ln_weight, p + 2 * w + 1, 2 * h);
    copy(out->ln_bias, p + 2 * w + 1 + 2 * h, 2 * h);
}

/* ---- Checkpoints ---- */

struct checkpoint {
    char magic[8];
    uint64_t key, n_params, n_done, sum; /* sum: of the arrays */
};
static const char magic[8] = "TNDMTRN1";

uint64_t target_train_key(const struct target_train *t, uint64_t key) {
    const struct target_train_options *o = &t->o;
    int64_t i[] = {(int64_t)key,     o->shape.kind,     o->shape.loss,  o->shape.hidden,
                   o->shape.n_heads, o->shape.head_dim, o->shape.width, o->shape.has_layernorm,
                   o->n_steps,       o->n_warmup,       o->batch,       (int64_t)o->seed,
                   t->n_items,       o->label,          o->n_queries};
    double d[] = {o->learning_rate, o->weight_decay, o->keep, o->aim};
    return XXH3_64bits_withSeed(i, sizeof i, XXH3_64bits(d, sizeof d));
}

int target_train_save(const struct target_train *t, const char *path, uint64_t key, struct err *e) {
    size_t bytes = 3 * t->adamw.n * sizeof(float);
    struct checkpoint c = {.key = target_train_key(t, key),
                           .n_params = t->adamw.n,
                           .n_done = (uint64_t)t->n_done,
                           .sum = XXH3_64bits(t->arrays, bytes)};
    memcpy(c.magic, magic, sizeof magic);
    struct strbuf temp = {0};
    strbuf_printf(&temp, "%s.new", path);
    FILE *f = temp.failed ? NULL : fopen(temp.data, "wb");
    bool ok = f && fwrite(&c, sizeof c, 1, f) == 1 && fwrite(t->arrays, bytes, 1, f) == 1;
    if (f) ok = fflush(f) == 0 && fsync(fileno(f)) == 0 && ok;
    if (f) ok = fclose(f) == 0 && ok;
    ok = ok && rename(temp.data, path) == 0;
    if (!ok && temp.data) unlink(temp.data);
    strbuf_deinit(&temp);
    return ok ? 0 : err_raise(e, E_IO, "cannot write the checkpoint %s", path);
}

int target_train_restore(struct target_train *t, const char *path, uint64_t key, struct err *e) {
    struct file f;
    struct checkpoint c;
    size_t bytes = 3 * t->adamw.n * sizeof(float);
    int rc = file_read(&f, path, sizeof c + bytes, e);
    if (rc) return rc;
    if (f.bytes >= sizeof c) memcpy(&c, f.data, sizeof c);
    if (f.bytes != sizeof c + bytes || memcmp(c.magic, magic, sizeof magic) != 0 ||
        c.n_params != t->adamw.n || c.n_done > (uint64_t)t->o.n_steps)
        rc = err_raise(e, E_FORMAT,
                       "%s: no whole checkpoint of %zu parameters (%zu bytes, want %zu); delete "
                       "it, and its training begins anew",
                       path, t->adamw.n, f.bytes, sizeof c + bytes);
    else if (c.key != target_train_key(t, key))
        rc = err_raise(e, E_INVALID,
                       "%s: a checkpoint of another training (model, texts, options or seed "
                       "differ); give another file, or no --resume",
                       path);
    else if (XXH3_64bits(f.data + sizeof c, bytes) != c.sum)
        rc = err_raise(e, E_FORMAT,
                       "%s: the checkpoint's bytes do not add up; delete it, and its training "
                       "begins anew",
                       path);
    if (!rc) {
        memcpy(t->arrays, f.data + sizeof c, bytes);
        t->n_done = (int)c.n_done;
    }
    file_close(&f);
    return rc;
}
