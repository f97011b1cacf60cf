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

/* Blocks that stay whatever they score. */
static int n_floor(const struct target_settings *s, int n_blocks) {
    return least(most(s->min_blocks, n_pinned(s, n_blocks)), n_blocks);
}

int target_n_kept(const struct target_settings *s, int n_tokens) {
    int n = target_n_blocks(n_tokens), k = s->keep_blocks;
    if (s->selector == TARGET_OFF || s->selector == TARGET_ALL) return n;
    if (k == 0) {
        double keep = s->keep;
        if (keep == TARGET_CURVE)
            keep = target_curve_keep(s->curve.n ? &s->curve : &target_source_curve, n_tokens);
        k = ceil_share(keep, n);
    }
    return least(most(k, n_floor(s, n)), n);
}

/* Does it measure something that neighbours share and a threshold can be held against? */
static bool measures(int selector) {
    return selector == TARGET_OBSERVED || target_by_states(selector);
}

static bool has_threshold(const struct target_settings *s) {
    return s->threshold != TARGET_NO_THRESHOLD && measures(s->selector);
}

int target_n_reserve(const struct target_settings *s, int n_tokens) {
    int n = target_n_blocks(n_tokens);
    return least(ceil_share(s->reserve, n), n - target_n_kept(s, n_tokens));
}

bool target_selects(const struct target_settings *s, int n_tokens) {
    int n = target_n_blocks(n_tokens);
    if (s->selector == TARGET_OFF || s->selector == TARGET_ALL) return false;
    return (has_threshold(s) ? n_floor(s, n) : target_n_kept(s, n_tokens)) < n;
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

static float score_of(int selector, const struct target_view *v, int block) {
    switch ((enum target_selector)selector) {
    case TARGET_OBSERVED:
        return v->mass[block];
    case TARGET_SCORER:
    case TARGET_MEAN:
    case TARGET_MINMAX:
    case TARGET_BOUND:
        return v->score[block];
    case TARGET_RECENT:
        return (float)block; /* exact below 2^24 */
    case TARGET_RANDOM:
        return (float)(draw(v, 0x80000000u + (uint32_t)block) >> 8);
    default:
        return 0;
    }
}

/* A block's score with a share of its neighbours' mean; neighbours that are not there or NaN count
 * for nothing. */
static float smoothed(double smooth, float before, float own, float after) {
    double sum = 0;
    int n = 0;
    if (!isnan(before)) sum += (double)before, n++;
    if (!isnan(after)) sum += (double)after, n++;
    return n == 0 ? own : (float)((double)own + smooth * sum / n);
}

/* Scores' keys; `key` may be where the scores themselves stand, so what is needed again is kept. */
static void fill_keys(const struct target_settings *s, const struct target_view *v, int selector,
                      int n, float *key) {
    bool smooth = s->smooth > 0 && measures(selector);
    float before = NAN, own = score_of(selector, v, 0);
    for (int i = 0; i < n; i++) {
        float after = i + 1 < n ? score_of(selector, v, i + 1) : NAN;
        set_key(key, i, key_of(smooth ? smoothed(s->smooth, before, own, after) : own));
        before = own;
        own = after;
    }
}

/* ---- The list ---- */

/* A block's mark while a list is made. */
enum { FREE, KEPT, ASIDE, DROPPED, CANDIDATE };

/* Mark the k best of the free blocks. */
static void mark_best(const float *key, int32_t *marked, int n, int k, int mark) {
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
            marked[i] = mark;
            n_left--;
        }
    for (int i = 0; i < n && n_left > 0; i++)
        if (!marked[i] && key_at(key, i) == lo) {
            marked[i] = mark;
            n_left--;
        }
    ASSERT(n_left == 0);
}

static void turn(int32_t *marked, int n, int from, int to) {
    for (int i = 0; i < n; i++)
        if (marked[i] == from) marked[i] = to;
}

/* Free blocks that reach the threshold. */
static int n_reach(const float *key, const int32_t *marked, int n, double threshold) {
    uint32_t least_key = key_of((float)threshold);
    int count = 0;
    for (int i = 0; i < n; i++) count += !marked[i] && key_at(key, i) >= least_key;
    return count;
}

static bool is_pinned(const struct target_settings *s, int block, int n) {
    return block == 0 || block >= n - s->window_blocks;
}

int target_n_dropped(const struct target_settings *s, const struct target_view *v) {
    int n = target_n_blocks(v->n_tokens), count = 0;
    for (int i = 0; v->used && s->drop > 0 && i < n; i++)
        count += !is_pinned(s, i, n) && !isnan(v->used[i]);
    return ceil_share(s->drop, count);
}

/* Mark the least used. What is 0 or more has the order of its bits. */
static void mark_dropped(const struct target_settings *s, const struct target_view *v,
                         int32_t *marked, int n) {
    int n_used = 0, n_out = target_n_dropped(s, v);
    if (n_out == 0) return;
    for (int i = 0; i < n; i++) {
        if (marked[i] == FREE && isnan(v->used[i])) marked[i] = ASIDE;
        n_used += marked[i] == FREE;
    }
    mark_best(v->used, marked, n, n_used - n_out, ASIDE);
    turn(marked, n, FREE, DROPPED);
    turn(marked, n, ASIDE, FREE);
}

/* What is known before blocks are taken by their keys: pinned and dropped ones are marked; returns
 * how many of the free ones are to be kept. */
static int begin(const struct target_settings *s, const struct target_view *v, const float *key,
                 int32_t *marked, int n, int selector) {
    int pinned = n_pinned(s, n), k = target_n_kept(s, v->n_tokens), floor = n_floor(s, n);
    int n_out = target_n_dropped(s, v), room = n - n_out;
    for (int i = 0; i < n; i++) marked[i] = is_pinned(s, i, n) ? KEPT : FREE;
    mark_dropped(s, v, marked, n);
    if (v->wide) k = least((int)ceil(TARGET_WIDE * k), n);
    floor = least(floor, room);
    k = least(most(k - n_out, floor), room);
    if (s->threshold == TARGET_NO_THRESHOLD || !measures(selector)) return k - pinned;
    return most(floor, least(k, pinned + n_reach(key, marked, n, s->threshold))) - pinned;
}

static bool rechecks(const struct target_settings *s, int selector) {
    return s->recheck == TARGET_RECHECK_BORDER && measures(selector);
}

static int n_free(const int32_t *marked, int n) {
    int count = 0;
    for (int i = 0; i < n; i++) count += marked[i] == FREE;
    return count;
}

/* Keep k: the better half by their keys, then those of the next up to 2 k that attention prefers.
 * Takes the keys. */
static void mark_rechecked(const struct target_view *v, float *key, int32_t *marked, int n, int k) {
    int sure = (k + 1) / 2;
    mark_best(key, marked, n, sure, KEPT);
    mark_best(key, marked, n, least(2 * k - sure, n_free(marked, n)), CANDIDATE);
    turn(marked, n, FREE, ASIDE);
    turn(marked, n, CANDIDATE, FREE);
    for (int i = 0; i < n; i++)
        if (marked[i] == FREE) set_key(key, i, key_of(v->attention[i]));
    mark_best(key, marked, n, k - sure, KEPT);
    turn(marked, n, ASIDE, FREE);
}

static int selector_of(const struct target_settings *s, const struct target_view *v) {
    return v->epoch > 0 ? s->reselector : s->selector;
}

static int gather(int32_t *marked, int n) {
    int count = 0;
    for (int i = 0; i < n; i++)
        if (marked[i] == KEPT) marked[count++] = i;
    return count;
}

int target_recheck(const struct target_settings *s, const struct target_view *v, float *score,
                   int32_t *list) {
    int n = target_n_blocks(v->n_tokens), selector = selector_of(s, v);
    if (s->selector == TARGET_OFF || s->selector == TARGET_ALL || !rechecks(s, selector)) return 0;
    fill_keys(s, v, selector, n, score);
    int k = begin(s, v, score, list, n, selector);
    mark_best(score, list, n, least(2 * k, n_free(list, n)), KEPT);
    /* A row sees its own block. */
    int own = most(v->n_tokens - TARGET_RECHECK_ROWS, 0) / TARGET_BLOCK;
    for (int i = own; i < n; i++) list[i] = KEPT;
    return gather(list, n);
}

int target_select(const struct target_settings *s, const struct target_view *v, float *score,
                  int32_t *kept) {
    int n = target_n_blocks(v->n_tokens), selector = selector_of(s, v);
    bool all = s->selector == TARGET_OFF || s->selector == TARGET_ALL;
    ASSERT(n > 0 && s->window_blocks >= 1);
    for (int i = 0; i < n && all; i++) kept[i] = KEPT;
    if (!all) {
        fill_keys(s, v, selector, n, score);
        int k = begin(s, v, score, kept, n, selector);
        if (v->attention && rechecks(s, selector)) mark_rechecked(v, score, kept, n, k);
        else mark_best(score, kept, n, k, KEPT);
        for (int i = 0; i < n; i++) set_key(score, i, draw(v, (uint32_t)i));
        mark_best(score, kept, n, least(ceil_share(s->reserve, n), n_free(kept, n)), KEPT);
    }
    return gather(kept, n);
}
