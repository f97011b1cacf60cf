/* Training of scorers. The gradient check reads the double build of the very text that trains, at
 * every parameter of small problems, against central differences: 1e-6 relative to the largest
 * gradient. The f32 builds are held to the double one. That training does something is shown on
 * windows whose labels come from a scorer of the same shape: it must find the best blocks of
 * windows that it never saw. */
#include "tests/harness.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/err.h"
#include "base/rng.h"
#include "base/threads.h"
#include "target/target.h"
#include "target/train.h"
#include "target/train_maths.h"

static double uniform(uint64_t seed, uint32_t i) {
    return (double)rng_uniform(seed, 0, RNG_TEST, i) * 2 - 1;
}

/* ---- Gradients ---- */

enum { BLOCKS = 9, PLACES = 3, H = 20, MOST_PARAMS = 4000 };

/* A small problem in double and, rounded, in f32. */
struct problem {
    struct target_train_shape shape;
    double rep[4 * BLOCKS * H], query[PLACES][5 * H], params[MOST_PARAMS];
    float rep32[4 * BLOCKS * H], query32[PLACES][5 * H], params32[MOST_PARAMS];
    float label[PLACES][BLOCKS];
    uint8_t positive[PLACES][BLOCKS];
    struct train_place place[PLACES], place32[PLACES];
    struct train_item item, item32;
};

static void fill(double *x, float *x32, size_t n, uint64_t seed) {
    for (size_t i = 0; i < n; i++) {
        x32[i] = (float)uniform(seed, (uint32_t)i);
        x[i] = (double)x32[i];
    }
}

static void make(struct problem *p, enum kern_score kind, enum target_loss loss, bool layernorm) {
    memset(p, 0, sizeof *p);
    p->shape = (struct target_train_shape){.kind = kind,
                                           .loss = loss,
                                           .hidden = H,
                                           .n_heads = kind == KERN_SCORE_LATE ? 3 : 0,
                                           .head_dim = kind == KERN_SCORE_LATE ? 7 : 0,
                                           .width = kind == KERN_SCORE_MLP ? 13 : 0,
                                           .has_layernorm = layernorm};
    fill(p->rep, p->rep32, 4 * BLOCKS * H, 1);
    fill(p->params, p->params32, target__train_n_params(&p->shape), 2);
    for (int i = 0; i < PLACES; i++) {
        double sum = 0;
        int first = i, n = BLOCKS - 2 * i;
        fill(p->query[i], p->query32[i], 5 * H, 3 + (uint64_t)i);
        for (int b = 0; b < n; b++) {
            p->label[i][b] = (float)(uniform(9, (uint32_t)(i * 100 + b)) + 1);
            sum += (double)p->label[i][b];
        }
        for (int b = 0; b < n; b++) {
            p->label[i][b] = (float)((double)p->label[i][b] / sum);
            p->positive[i][b] = b % 3 == i % 2;
        }
        p->place[i] = (struct train_place){p->query[i], i == 1 ? 1 : 5, first,
                                           n,           p->label[i],    p->positive[i]};
        p->place32[i] = p->place[i];
        p->place32[i].query = p->query32[i];
    }
    p->item = (struct train_item){p->rep, BLOCKS, PLACES, p->place, .25};
    p->item32 = (struct train_item){p->rep32, BLOCKS, PLACES, p->place32, .25};
}

static double loss_at(struct problem *p, void *scratch) {
    return train_maths_double.item(&p->shape, p->params, &p->item, scratch, NULL, NULL);
}

static void check_gradient(enum kern_score kind, enum target_loss loss, bool layernorm) {
    static struct problem p;
    static double grad[MOST_PARAMS];
    make(&p, kind, loss, layernorm);
    size_t n = target__train_n_params(&p.shape);
    assert_in_range(n, 1, MOST_PARAMS);
    void *scratch = aligned_alloc(64, train_maths_double.scratch_bytes(&p.shape, BLOCKS) + 64);
    double l = train_maths_double.item(&p.shape, p.params, &p.item, scratch, grad, NULL);
    double top = 0, worst = 0;
    assert_true(l > 0);
    assert_near(loss_at(&p, scratch), l, 1e-12);
    for (size_t i = 0; i < n; i++) top = fmax(top, fabs(grad[i]));
    assert_true(top > 1e-3);
    for (size_t i = 0; i < n; i++) {
        /* Fourth order: the error is far below what is asked for. */
        double x = p.params[i], h = 1e-3, f[4];
        static const double at[4] = {-2, -1, 1, 2};
        for (int k = 0; k < 4; k++) {
            p.params[i] = x + at[k] * h;
            f[k] = loss_at(&p, scratch);
        }
        p.params[i] = x;
        double want = (f[0] - 8 * f[1] + 8 * f[2] - f[3]) / (12 * h);
        double apart = fabs(grad[i] - want) / top;
        if (apart > 1e-6)
            fail_msg("kind %d, loss %d: parameter %zu has gradient %.12g, want %.12g", (int)kind,
                     (int)loss, i, grad[i], want);
        worst = fmax(worst, apart);
    }
    fprintf(stderr, "# gradient of kind %d, loss %s%s: worst %.2g relative\n", (int)kind,
            target_loss_name(loss), layernorm ? ", LayerNorm" : "", worst);
    free(scratch);
}

static void test_train_gradients(void) {
    for (int loss = 0; loss < TARGET_N_LOSSES; loss++) {
        check_gradient(KERN_SCORE_LATE, (enum target_loss)loss, false);
        check_gradient(KERN_SCORE_MLP, (enum target_loss)loss, false);
        check_gradient(KERN_SCORE_MLP, (enum target_loss)loss, true);
    }
}

/* Every f32 build that runs here beside the double one: loss, scores and gradient. */
static void test_train_single(void) {
    static const struct train_maths *const all[] = {&train_maths_plain, &train_maths_avx2,
                                                    &train_maths_avx512};
    static struct problem p;
    static double grad[MOST_PARAMS], score[PLACES * BLOCKS];
    static float grad32[MOST_PARAMS], score32[PLACES * BLOCKS];
    for (int which = 0; which < 3; which++) {
        if (which == 1 && target__train_maths() == all[0]) break;
        if (which == 2 && target__train_maths() != all[2]) break;
        for (int kind = 0; kind < 2; kind++) {
            make(&p, kind ? KERN_SCORE_MLP : KERN_SCORE_LATE, TARGET_LOSS_KL, kind);
            size_t bytes = train_maths_double.scratch_bytes(&p.shape, BLOCKS) + 4096;
            void *scratch = aligned_alloc(64, (bytes + 63) / 64 * 64 * 4);
            double want =
                train_maths_double.item(&p.shape, p.params, &p.item, scratch, grad, score);
            double got =
                all[which]->item(&p.shape, p.params32, &p.item32, scratch, grad32, score32);
            assert_near(got, want, 1e-5);
            for (int i = 0; i < PLACES; i++)
                for (int b = p.place[i].first; b < p.place[i].first + p.place[i].n; b++)
                    assert_near(score32[i * BLOCKS + b], score[i * BLOCKS + b], 2e-5);
            for (size_t i = 0; i < target__train_n_params(&p.shape); i++)
                assert_near(grad32[i], grad[i], 1e-5);
            free(scratch);
        }
    }
}

/* ---- A planted scorer ---- */

enum { N_WINDOWS = 120, WIDE = 32, N_BLOCKS = 24, HELD = 20, TELLS = 8 };

/* Windows of random states in which the label is e to the likeness of query and representative in
 * TELLS of their coordinates; of LATE the most over queries and quarters. */
static struct target_window *windows[N_WINDOWS];

static void plant(bool quarters) {
    struct err e = {0};
    for (int i = 0; i < N_WINDOWS; i++) {
        struct target_window *w = windows[i] = calloc(1, sizeof *w);
        assert_non_null(w);
        w->n_blocks = N_BLOCKS;
        w->labels = 1U << TARGET_LABEL_DEEP;
        w->has_quarters = quarters;
        w->is_held_out = i < HELD;
        w->n_places = 4;
        for (int k = 0; k < 4; k++)
            w->place[k] = (struct target_place){
                .n_tokens = 64 * N_BLOCKS, .n_queries = 4, .first = 1, .n = N_BLOCKS - 4};
        assert_ok(target_window_alloc(w, WIDE, &e), e);
        uint64_t seed = 100 + (uint64_t)i;
        static float plane[N_BLOCKS * 4 * WIDE];
        for (uint32_t x = 0; x < N_BLOCKS * 4 * WIDE; x++)
            plane[x] = (float)uniform(seed, x) * (quarters ? 16 : 64);
        for (int b = 0; !quarters && b < N_BLOCKS; b++)
            for (int q = 1; q < 4; q++)
                memcpy(plane + (b * 4 + q) * WIDE, plane + b * 4 * WIDE, WIDE * sizeof *plane);
        target_window_represent(w, plane, WIDE, false, false);
        for (int k = 0; k < 4; k++) {
            struct target_place *at = &w->place[k];
            for (uint32_t x = 0; x < 4 * WIDE; x++)
                at->query[x] = (float)uniform(seed + 1000, (uint32_t)k * 1000 + x);
            for (int t = 0; t < 4; t++) target_norm(at->query + t * WIDE, WIDE);
            for (int b = 0; b < at->n; b++) {
                double best = -INFINITY;
                for (int q = 0; q < (quarters ? 4 : 1); q++)
                    for (int t = quarters ? 0 : 3; t < 4; t++) {
                        const float *r = quarters ? w->quarter + ((at->first + b) * 4 + q) * WIDE
                                                  : w->rep + (at->first + b) * WIDE;
                        double dot = 0;
                        for (int d = 0; d < TELLS; d++)
                            dot += (double)(at->query[t * WIDE + 3 * d] * r[3 * d]);
                        best = fmax(best, dot / 2);
                    }
                at->label[TARGET_LABEL_DEEP][b] = (float)exp(best);
            }
        }
    }
}

static void unplant(void) {
    for (int i = 0; i < N_WINDOWS; i++) {
        target_window_free(windows[i]);
        free(windows[i]);
    }
}

static struct target_train_options options(enum kern_score kind) {
    bool late = kind == KERN_SCORE_LATE;
    return (struct target_train_options){
        .shape = {.kind = kind,
                  .loss = late ? TARGET_LOSS_KL : TARGET_LOSS_BCE_RANK,
                  .hidden = WIDE,
                  .n_heads = late ? 2 : 0,
                  .head_dim = late ? 8 : 0,
                  .width = late ? 0 : 48,
                  .has_layernorm = !late},
        .n_steps = 60,
        .n_warmup = 5,
        .batch = 8,
        .label = TARGET_LABEL_DEEP,
        .learning_rate = 1e-2,
        .weight_decay = 0.01,
        .keep = .15,
        .seed = 7};
}

static struct target_train *train(const struct target_train_options *o, struct threads *threads) {
    struct target_train *t;
    struct err e = {0};
    assert_ok(target_train_open(&t, o, (const struct target_window *const *)windows, N_WINDOWS,
                                threads, &e),
              e);
    return t;
}

static double held_out_recall(struct target_train *t) {
    static float score[TARGET_MAX_PLACES * N_BLOCKS];
    double sum = 0;
    int n = 0;
    for (int i = 0; i < HELD; i++) {
        target_train_score(t, windows[i], score);
        for (int k = 0; k < windows[i]->n_places; k++, n++) {
            const struct target_place *p = &windows[i]->place[k];
            sum += target_recall(score + k * N_BLOCKS + p->first, p->label[TARGET_LABEL_DEEP], p->n,
                                 4, NULL);
        }
    }
    return sum / n;
}

/* Chance finds 4 of 20: a fifth. */
static void test_train_learns(void) {
    struct threads *threads;
    struct err e = {0};
    assert_ok(threads_open(&threads, 2, &e), e);
    for (int kind = 0; kind < 2; kind++) {
        struct target_train_options o = options(kind ? KERN_SCORE_MLP : KERN_SCORE_LATE);
        o.n_steps = 400;
        plant(kind == 0);
        struct target_train *t = train(&o, threads);
        double before = held_out_recall(t), loss = 0, first = 0;
        while (target_train_step(t, &loss))
            if (target_train_steps_done(t) == 1) first = loss;
        double after = held_out_recall(t);
        fprintf(stderr, "# kind %d: recall %.3f before, %.3f after; loss %.3f to %.3f\n", kind,
                before, after, first, loss);
        assert_true(loss < first);
        assert_true(after > before + .15);
        assert_true(after > .45);
        target_train_close(t);
        unplant();
    }
    threads_close(threads);
}

/* All weights, one after another. */
static size_t weights_of(const struct target_train *t, const struct target_train_options *o,
                         float *out) {
    const struct target_train_shape *s = &o->shape;
    size_t d = (size_t)(s->n_heads * s->head_dim) * WIDE, w = (size_t)s->width;
    struct target_train_weights to = {.a = out, .b = out + d};
    if (s->kind == KERN_SCORE_MLP)
        to = (struct target_train_weights){.w1 = out,
                                           .b1 = out + 2 * WIDE * w,
                                           .w2 = out + (2 * WIDE + 1) * w,
                                           .b2 = out + (2 * WIDE + 2) * w,
                                           .ln_weight = out + (2 * WIDE + 2) * w + 1,
                                           .ln_bias = out + (2 * WIDE + 2) * w + 1 + 2 * WIDE};
    target_train_weights(t, &to);
    return target__train_n_params(s);
}

/* The same bits twice, for one thread and three, and where a checkpoint was gone on from. */
static void test_train_repeats(void) {
    static float weights[4][8192];
    char path[64];
    struct err e = {0};
    snprintf(path, sizeof path, "/tmp/tandem-train-%d", (int)getpid());
    for (int kind = 0; kind < 2; kind++) {
        struct target_train_options o = options(kind ? KERN_SCORE_MLP : KERN_SCORE_LATE), other;
        size_t n = 0;
        plant(kind == 0);
        for (int way = 0; way < 4; way++) {
            struct threads *threads;
            assert_ok(threads_open(&threads, way == 1 ? 3 : 1, &e), e);
            struct target_train *t = train(&o, threads);
            if (way == 3) {
                assert_int_equal(target_train_restore(t, path, 6, &e), E_INVALID);
                other = o;
                other.learning_rate *= 2;
                struct target_train *t2 = train(&other, threads);
                assert_int_equal(target_train_restore(t2, path, 5, &e), E_INVALID);
                target_train_close(t2);
                assert_ok(target_train_restore(t, path, 5, &e), e);
                assert_int_equal(target_train_steps_done(t), 23);
            }
            while (target_train_step(t, NULL))
                if (way == 2 && target_train_steps_done(t) == 23) {
                    assert_ok(target_train_save(t, path, 5, &e), e);
                    break;
                }
            assert_int_equal(target_train_steps_done(t), way == 2 ? 23 : o.n_steps);
            n = weights_of(t, &o, weights[way]);
            assert_in_range(n, 1, 8192);
            if (way == 1 || way == 3)
                assert_memory_equal(weights[way], weights[0], n * sizeof(float));
            if (way == 2) assert_memory_not_equal(weights[way], weights[0], n * sizeof(float));
            target_train_close(t);
            threads_close(threads);
        }
        unlink(path);
        unplant();
    }
}

/* A checkpoint that was cut or changed is refused. */
static void test_train_torn_checkpoint(void) {
    struct threads *threads;
    struct err e = {0};
    char path[64];
    snprintf(path, sizeof path, "/tmp/tandem-train-%d", (int)getpid());
    assert_ok(threads_open(&threads, 1, &e), e);
    plant(true);
    struct target_train_options o = options(KERN_SCORE_LATE);
    struct target_train *t = train(&o, threads);
    assert_true(target_train_step(t, NULL));
    assert_int_equal(target_train_restore(t, "/tmp/tandem-no-such-file", 1, &e), E_NOT_FOUND);
    for (int damage = 0; damage < 4; damage++) {
        assert_ok(target_train_save(t, path, 1, &e), e);
        FILE *f = fopen(path, "r+b");
        assert_non_null(f);
        if (damage < 2) assert_int_equal(ftruncate(fileno(f), damage ? 100 : 7), 0);
        else {
            fseek(f, damage == 2 ? 0 : 400, SEEK_SET);
            int c = fgetc(f);
            fseek(f, damage == 2 ? 0 : 400, SEEK_SET);
            fputc(c ^ 1, f);
        }
        fclose(f);
        assert_int_equal(target_train_restore(t, path, 1, &e), E_FORMAT);
        assert_non_null(strstr(e.message, "delete it")); /* what to do about it */
        assert_int_equal(target_train_steps_done(t), 1);
    }
    unlink(path);
    target_train_close(t);
    unplant();
    threads_close(threads);
}

/* ---- The operation scores alike ---- */

/* kern_ops.score over a plane and a ring, and the trainer over what it makes of them. */
static void test_train_scores_as_served(void) {
    static float plane[N_BLOCKS * 4 * WIDE], ring[32 * WIDE], weights[8192], score[4 * N_BLOCKS];
    static float got[N_BLOCKS];
    int32_t page[N_BLOCKS];
    struct err e = {0};
    struct threads *threads;
    struct kern *k;
    struct kern_options ko = {.n_threads = 1};
    assert_ok(threads_open(&threads, 1, &e), e);
    assert_ok(kern_cpu_open(&k, &ko, &e), e);
    for (int kind = 0; kind < 3; kind++) {
        struct target_train_options o = options(kind ? KERN_SCORE_MLP : KERN_SCORE_LATE);
        o.shape.has_layernorm = kind == 1;
        plant(kind == 0);
        for (int i = 0; i < N_BLOCKS; i++) page[i] = i;
        for (uint32_t i = 0; i < N_BLOCKS * 4 * WIDE; i++)
            plane[i] = (float)uniform(50, i) * 30 + 3;
        for (uint32_t i = 0; i < 32 * WIDE; i++) ring[i] = (float)uniform(51, i) * 5 - 1;
        struct target_window *w = windows[0];
        target_window_represent(w, plane, WIDE, false, false);
        /* The newest of 64 N_BLOCKS tokens are the last of the ring. */
        for (int t = 0; t < 4; t++) {
            memcpy(w->place[0].query + t * WIDE, ring + (28 + t) * WIDE, WIDE * sizeof *ring);
            target_norm(w->place[0].query + t * WIDE, WIDE);
        }
        struct target_train *t = train(&o, threads);
        while (target_train_step(t, NULL)) {
        }
        target_train_score(t, w, score);
        weights_of(t, &o, weights);
        size_t d = (size_t)(o.shape.n_heads * o.shape.head_dim) * WIDE, u = (size_t)o.shape.width;
        struct kern_scorer s = {.kind = o.shape.kind,
                                .cols = WIDE,
                                .n_queries = 4,
                                .normed = true,
                                .n_heads = o.shape.n_heads,
                                .head_dim = o.shape.head_dim,
                                .a = weights,
                                .b = weights + d,
                                .width = o.shape.width,
                                .w1 = weights,
                                .b1 = weights + 2 * WIDE * u,
                                .w2 = weights + (2 * WIDE + 1) * u,
                                .b2 = weights + (2 * WIDE + 2) * u};
        if (kind == 1) {
            s.ln_weight = weights + (2 * WIDE + 2) * u + 1;
            s.ln_bias = s.ln_weight + 2 * WIDE;
        }
        struct kern_score_view v = {
            .plane = {.base = plane, .page_stride = 4 * WIDE * 4, .cols = WIDE},
            .page = page,
            .ring = ring,
            .n_tokens = 64 * N_BLOCKS};
        void *scratch =
            aligned_alloc(64, (k->ops->score_scratch_bytes(k, &s, N_BLOCKS) + 127) / 64 * 64);
        assert_int_equal(k->ops->score(k, &s, &v, scratch, got), 0);
        float spread = 0;
        for (int b = 1; b < 1 + w->place[0].n; b++) {
            spread = fmaxf(spread, fabsf(got[b] - got[1]));
            assert_near(score[b], got[b], 1e-4 * (1 + fabs((double)got[b])));
        }
        assert_true(spread > 1e-2f);
        free(scratch);
        target_train_close(t);
        unplant();
    }
    k->ops->close(k);
    threads_close(threads);
}

/* ---- Marks ---- */

/* With aim 1 a place is trained towards its mark, as if that were its label; with 0 the mark is
 * nothing. And of its queries only the newest may ask. */
static void test_train_aim(void) {
    static float weights[5][8192];
    struct threads *threads;
    struct err e = {0};
    assert_ok(threads_open(&threads, 1, &e), e);
    plant(true);
    for (int i = 0; i < N_WINDOWS; i++)
        for (int k = 0; k < windows[i]->n_places; k++)
            for (int b = 0; b < windows[i]->place[k].n; b++)
                windows[i]->place[k].mark[b] = b == (i + k) % 7 ? .75f : b == 9 ? .25f : 0;
    for (int way = 0; way < 5; way++) {
        struct target_train_options o = options(KERN_SCORE_LATE);
        o.n_steps = 12;
        o.aim = way == 2 ? 1 : way == 1 ? .5 : 0;
        o.n_queries = way == 4 ? 2 : 0;
        if (way == 3) /* the marks as labels */
            for (int i = 0; i < N_WINDOWS; i++)
                for (int k = 0; k < windows[i]->n_places; k++)
                    memcpy(windows[i]->place[k].label[TARGET_LABEL_DEEP], windows[i]->place[k].mark,
                           (size_t)windows[i]->place[k].n * sizeof(float));
        struct target_train *t = train(&o, threads);
        while (target_train_step(t, NULL)) {
        }
        weights_of(t, &o, weights[way]);
        target_train_close(t);
    }
    assert_memory_not_equal(weights[0], weights[1], sizeof weights[0]);
    assert_memory_not_equal(weights[1], weights[2], sizeof weights[0]);
    assert_memory_equal(weights[2], weights[3], sizeof weights[0]);
    assert_memory_not_equal(weights[3], weights[4], sizeof weights[0]);
    /* A label that no window has is refused. */
    struct target_train_options o = options(KERN_SCORE_LATE);
    struct target_train *t;
    o.label = TARGET_LABEL_LAST;
    assert_int_equal(target_train_open(&t, &o, (const struct target_window *const *)windows,
                                       N_WINDOWS, threads, &e),
                     E_INVALID);
    unplant();
    threads_close(threads);
}

/* ---- Labels and recall ---- */

static int descending(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

static void test_train_labels(void) {
    enum { LAYERS = 5, HEADS = 3, STRIDE = 7, FIRST = 2, ROWS = 10 };
    static float mass[LAYERS * HEADS * STRIDE];
    float out[STRIDE];
    for (uint32_t i = 0; i < LAYERS * HEADS * STRIDE; i++) mass[i] = (float)(uniform(4, i) + 1);
    struct target_masses m = {mass, FIRST, LAYERS, HEADS, ROWS, 6, STRIDE};
    for (int select = FIRST; select < FIRST + LAYERS; select++)
        for (int l = 0; l < TARGET_N_LABELS; l++) {
            target_label_of((enum target_label)l, &m, select, 6, out);
            for (int b = 0; b < 6; b++) {
                float all[LAYERS * HEADS];
                int n = 0;
                int from = l == TARGET_LABEL_DEEP || l == TARGET_LABEL_STRONGEST
                               ? select
                               : FIRST + LAYERS - 1;
                for (int layer = from; layer < FIRST + LAYERS; layer++)
                    for (int h = 0; h < HEADS; h++)
                        all[n++] = mass[((layer - FIRST) * HEADS + h) * STRIDE + b];
                qsort(all, (size_t)n, sizeof *all, descending);
                if (l == TARGET_LABEL_STRONGEST && n > 8) n = 8;
                double sum = 0;
                for (int i = 0; i < n; i++) sum += (double)all[i];
                assert_near(out[b], sum / n / (l == TARGET_LABEL_ACCUMULATED ? 1 : ROWS), 1e-6);
            }
        }
    enum target_label l;
    enum target_loss loss;
    struct err e = {0};
    assert_ok(target_label_parse(&l, "strongest", &e), e);
    assert_int_equal(l, TARGET_LABEL_STRONGEST);
    assert_int_equal(target_label_parse(&l, "best", &e), E_RANGE);
    assert_ok(target_loss_parse(&loss, "bce+rank", &e), e);
    assert_int_equal(loss, TARGET_LOSS_BCE_RANK);
    assert_int_equal(target_loss_parse(&loss, "", &e), E_RANGE);
}

static void test_train_recall(void) {
    static const float label[] = {.1f, .4f, .1f, .3f, .1f}, same[] = {1, 1, 1, 1, 1};
    static const float other[] = {0, 2, 9, 8, 1};
    double mass;
    assert_near(target_recall(label, label, 5, 2, &mass), 1, 0);
    assert_near(mass, .7, 1e-6);
    assert_near(target_recall(other, label, 5, 2, &mass), .5, 0);
    assert_near(mass, .4, 1e-6);
    assert_near(target_recall(same, label, 5, 2, &mass), .5, 0); /* ties: blocks 0 and 1 */
    assert_near(mass, .5, 1e-6);
    assert_near(target_recall(other, label, 5, 9, &mass), 1, 0);
    static const float odd[] = {NAN, 2, -INFINITY, 2, NAN};
    uint8_t best[5];
    for (int n = 0; n <= 5; n++) {
        static const int order[] = {1, 3, 2, 0, 4};
        target_best(odd, 5, n, best);
        for (int i = 0; i < 5; i++) assert_int_equal(best[order[i]], i < n);
    }
}

const struct test tests[] = {
    {"train_gradients", TEST_QUICK, 60000, test_train_gradients},
    {"train_single", TEST_QUICK, 60000, test_train_single},
    {"train_learns", TEST_QUICK, 120000, test_train_learns},
    {"train_repeats", TEST_QUICK, 60000, test_train_repeats},
    {"train_torn_checkpoint", TEST_QUICK, 60000, test_train_torn_checkpoint},
    {"train_scores_as_served", TEST_QUICK, 60000, test_train_scores_as_served},
    {"train_aim", TEST_QUICK, 60000, test_train_aim},
    {"train_labels", TEST_QUICK, 60000, test_train_labels},
    {"train_recall", TEST_QUICK, 60000, test_train_recall},
    {0},
};
