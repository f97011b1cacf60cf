/* How many blocks stay, and which. Counts are doubles' arithmetic of a few operations; the order of
 * blocks is that of unsigned integers made of the f32 scores, so that it is total and the same
 * everywhere. The k-th largest is found by halving the range of those integers: no scratch, 32
 * passes over the blocks, 2,048 of them in well under 0.1 ms. */
#include <math.h>
#include <string.h>

#include "base/err.h"
#include "base/rng.h"
#include "target/target.h"

/* ---- How many ---- */

const struct target_curve target_source_curve = {
    .n = 4, .at = {{8192, 1}, {16384, .15}, {32768, .10}, {131072, .05}}};

double target_curve_keep(const struct target_curve *c, double n_tokens) {
    int i = 0;
    while (i < c->n && c->at[i].tokens <= n_tokens) i++;
    if (i == 0) return c->at[0].keep;
    if (i == c->n) return c->at[c->n - 1].keep;
    double along = log(n_tokens / c->at[i - 1].tokens) / log(c->at[i].tokens / c->at[i - 1].tokens);
    return c->at[i - 1].keep + along * (c->at[i].keep - c->at[i - 1].keep);
}

static int least(int a, int b) {
    return a < b ? a : b;
}
static int most(int a, int b) {
    return a > b ? a : b;
}

/* ceil of a product that would be whole but for rounding. */
static int ceil_share(double share, int n) {
    return least((int)ceil(share * n - 1e-9), n);
}

static int n_pinned(const struct target_settings *s, int n_blocks) {
    return s->window_blocks < n_blocks ? s->window_blocks + 1 : n_blocks;
}

int target_n_kept(const struct target_settings *s, int n_tokens) {
    int n = target_n_blocks(n_tokens), k = s->keep_blocks;
    if (s->selector == TARGET_OFF || s->selector == TARGET_ALL) return n;
    if (k == 0) {
        double keep = s->keep;
        if (keep == TARGET_CURVE) keep = target_curve_keep(&target_source_curve, n_tokens);
        k = ceil_share(keep, n);
    }
    k = most(most(k, s->min_blocks), n_pinned(s, n));
    return least(k, n);
}

int target_n_reserve(const struct target_settings *s, int n_tokens) {
    int n = target_n_blocks(n_tokens);
    return least(ceil_share(s->reserve, n), n - target_n_kept(s, n_tokens));
}

bool target_selects(const struct target_settings *s, int n_tokens) {
    return target_n_kept(s, n_tokens) < target_n_blocks(n_tokens);
}

bool target_observes(const struct target_settings *s, int n_tokens) {
    return s->selector == TARGET_OBSERVED && target_selects(s, n_tokens);
}

/* ---- Scores ---- */

/* A key per block, in the place of its score: larger is better. */
static uint32_t key_at(const float *key, int i) {
    uint32_t bits;
    memcpy(&bits, key + i, sizeof bits);
    return bits;
}

static void set_key(float *key, int i, uint32_t bits) {
    memcpy(key + i, &bits, sizeof bits);
}

/* Order of floats as order of integers; NaN below all, both zeros equal. */
static uint32_t key_of(float score) {
    uint32_t bits;
    if (isnan(score)) return 0;
    score += 0.0f; /* -0 becomes 0 */
    memcpy(&bits, &score, sizeof bits);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* The draws of one epoch: index i < 2^31 is the reserve's of block i, above are the selector's. */
static uint32_t draw(const struct target_view *v, uint32_t index) {
    return rng_u32(v->seed, (uint64_t)v->epoch, RNG_SELECTION, index);
}

static float score_of(const struct target_settings *s, const struct target_view *v, int block) {
    switch ((enum target_selector)s->selector) {
    case TARGET_OBSERVED:
        return v->mass[block];
    case TARGET_RECENT:
        return (float)block; /* exact below 2^24 */
    case TARGET_RANDOM:
        return (float)(draw(v, 0x80000000u + (uint32_t)block) >> 8);
    default:
        return 0;
    }
}

/* ---- The list ---- */

/* Mark the k best of the n blocks that carry no mark. */
static void mark_best(const float *key, int32_t *marked, int n, int k) {
    uint32_t lo = 0, hi = UINT32_MAX; /* the k-th best key is in [lo, hi] */
    int n_left = k;
    if (k <= 0) return;
    while (lo < hi) {
        uint32_t mid = lo + (hi - lo) / 2 + 1;
        int count = 0;
        for (int i = 0; i < n; i++) count += !marked[i] && key_at(key, i) >= mid;
        if (count >= k) lo = mid;
        else hi = mid - 1;
    }
    for (int i = 0; i < n; i++)
        if (!marked[i] && key_at(key, i) > lo) {
            marked[i] = 1;
            n_left--;
        }
    for (int i = 0; i < n && n_left > 0; i++)
        if (!marked[i] && key_at(key, i) == lo) {
            marked[i] = 1;
            n_left--;
        }
    ASSERT(n_left == 0);
}

int target_select(const struct target_settings *s, const struct target_view *v, float *score,
                  int32_t *kept) {
    int n = target_n_blocks(v->n_tokens), k = target_n_kept(s, v->n_tokens), n_kept = 0;
    ASSERT(n > 0 && s->window_blocks >= 1);
    for (int i = 0; i < n; i++) kept[i] = i == 0 || i >= n - s->window_blocks || k == n;
    if (k < n) {
        for (int i = 0; i < n; i++) set_key(score, i, key_of(score_of(s, v, i)));
        mark_best(score, kept, n, k - n_pinned(s, n));
        for (int i = 0; i < n; i++) set_key(score, i, draw(v, (uint32_t)i));
        mark_best(score, kept, n, target_n_reserve(s, v->n_tokens));
    }
    for (int i = 0; i < n; i++)
        if (kept[i]) kept[n_kept++] = i;
    return n_kept;
}
