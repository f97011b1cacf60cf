/* The filters of sampling. Every filter keeps a prefix of one order (higher logit first, lower id
 * first among equals), so nothing long is sorted: a threshold is found by counting or weighing the
 * logits' bits, 11 at a time, over the few candidates near the maximum. Ties: top-k keeps exactly
 * k. top-p keeps the shortest prefix that holds top_p of what top-k left, at least one token; min-p
 * keeps weights of at least min_p times the largest. A temperature below 1e-5 is greedy: the
 * distribution is its one token.
 *
 * Weights are f32, sums double in an order that the row alone decides. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "base/checked.h"
#include "base/err.h"
#include "kernels/cpu/sampler.h"

enum {
    BLOCK = 32,      /* columns that are looked at together */
    SORT_BELOW = 48, /* candidates that are sorted instead */
    MAX_BANNED = (int)(sizeof((struct kern_sample *)0)->banned / sizeof(int32_t)),
    MAX_COUNT = UINT16_MAX, /* of a token: kern_history saturates there */
};
static const float GREEDY_BELOW = 1e-5f;

size_t cpu_sampler_bytes(int vocab) {
    return 4 * align_up((size_t)vocab * 4, 64) + CPU_SAMPLER_BINS * sizeof(double);
}

struct cpu_sampler cpu_sampler_carve(const struct cpu_isa *isa, int vocab, const int32_t *ids,
                                     void *scratch) {
    size_t part = align_up((size_t)vocab * 4, 64);
    uint8_t *p = scratch;
    return (struct cpu_sampler){
        .isa = isa,
        .vocab = vocab,
        .ids = ids,
        .adjusted = (float *)(void *)p,
        .col = (int32_t *)(void *)(p + part),
        .kept = (float *)(void *)(p + 2 * part),
        .w = (float *)(void *)(p + 3 * part),
        .bins = (double *)(void *)(p + 4 * part),
    };
}

int cpu_sampler_column(const int32_t *ids, int n, int32_t token) {
    if (!ids) return token >= 0 && token < n ? token : -1;
    int low = 0, high = n;
    while (low < high) {
        int mid = low + (high - low) / 2;
        if (ids[mid] < token) low = mid + 1;
        else high = mid;
    }
    return low < n && ids[low] == token ? low : -1;
}

/* ---- Penalties ----------------------------------------------------------------------------- */

static bool has_penalties(const struct kern_sample *p, const struct kern_history *h) {
    return h && p->history >= 0 &&
           (p->repetition_penalty != 1.f || p->presence_penalty != 0.f ||
            p->frequency_penalty != 0.f);
}

/* Repetition first, as Hugging Face has it: a seen token's positive logit is divided, a negative
 * one multiplied. Then OpenAI's two, over the output alone. */
static float penalised(float x, bool in_prompt, int n_output, const struct kern_sample *p) {
    if (!in_prompt && !n_output) return x;
    x = x > 0 ? x / p->repetition_penalty : x * p->repetition_penalty;
    if (n_output) x -= p->presence_penalty + p->frequency_penalty * (float)n_output;
    return x;
}

/* Tokens that stand only among the row's recent ones, and those counted already, from the raw
 * logit: each once, however often it stands there. */
static void penalise_recent(const struct cpu_sampler *s, const float *logits,
                            const struct kern_sample *p, const uint16_t *prompt,
                            const uint16_t *output, const int32_t *recent) {
    for (int i = 0; i < p->n_recent; i++) {
        int32_t token = recent[i];
        int col = cpu_sampler_column(s->ids, s->vocab, token);
        if (col < 0) continue;
        int n_output = output[token];
        for (int j = 0; j < p->n_recent; j++) n_output += recent[j] == token;
        if (n_output > MAX_COUNT) n_output = MAX_COUNT;
        s->adjusted[col] = penalised(logits[col], prompt[token] != 0, n_output, p);
    }
}

static void penalise(const struct cpu_sampler *s, const float *logits, const struct kern_sample *p,
                     const struct kern_history *h) {
    const uint16_t *prompt = h->prompt + (size_t)p->history * h->stride;
    const uint16_t *output = h->output + (size_t)p->history * h->stride;
    ASSERT((size_t)(s->ids ? s->ids[s->vocab - 1] : s->vocab - 1) < h->stride);
    for (int begin = 0; begin < s->vocab; begin += 32) {
        int end = begin + 32 < s->vocab ? begin + 32 : s->vocab;
        if (s->ids) {
            for (int i = begin; i < end; i++) {
                int32_t t = s->ids[i];
                s->adjusted[i] = penalised(s->adjusted[i], prompt[t] != 0, output[t], p);
            }
            continue;
        }
        unsigned any = 0;
        for (int i = begin; i < end; i++) any |= (unsigned)(prompt[i] | output[i]);
        if (!any) continue;
        for (int i = begin; i < end; i++)
            s->adjusted[i] = penalised(s->adjusted[i], prompt[i] != 0, output[i], p);
    }
    if (p->n_recent > 0) penalise_recent(s, logits, p, prompt, output, h->recent + p->first_recent);
}

/* The row's logits as the request wants them: the raw ones where it wants no change. */
static const float *adjust(struct cpu_sampler *s, const float *logits, const struct kern_sample *p,
                           const struct kern_history *h) {
    ASSERT(p->n_banned >= 0 && p->n_banned <= MAX_BANNED);
    ASSERT(p->n_recent >= 0 && p->n_recent <= KERN_MAX_DRAFT);
    if (!has_penalties(p, h) && p->n_banned == 0) return logits;
    memcpy(s->adjusted, logits, (size_t)s->vocab * sizeof *logits);
    if (has_penalties(p, h)) {
        ASSERT(p->n_recent == 0 || (h->recent && p->first_recent >= 0));
        penalise(s, logits, p, h);
    }
    for (int i = 0; i < p->n_banned; i++) {
        int col = cpu_sampler_column(s->ids, s->vocab, p->banned[i]);
        if (col >= 0) s->adjusted[col] = -INFINITY;
    }
    return s->adjusted;
}

/* ---- Candidates ---------------------------------------------------------------------------- */

/* Of BLOCK columns or the row's last ones; in lanes, so that it compiles to vectors. */
static float block_max(const float *x, int n) {
    enum { LANES = 8 };
    float lane[LANES], top = -INFINITY;
    if (n == BLOCK) {
        for (int j = 0; j < LANES; j++) lane[j] = x[j];
        for (int i = LANES; i < BLOCK; i += LANES)
            for (int j = 0; j < LANES; j++) lane[j] = x[i + j] > lane[j] ? x[i + j] : lane[j];
        x = lane;
        n = LANES;
    }
    for (int i = 0; i < n; i++) top = x[i] > top ? x[i] : top;
    return top;
}

static int block_end(const struct cpu_sampler *s, int begin) {
    return begin + BLOCK < s->vocab ? begin + BLOCK : s->vocab;
}

/* A block's columns whose logit is at least `cut` join the n candidates so far. Without a branch:
 * which ones pass is chance. n never passes i. */
static int collect_block(struct cpu_sampler *s, const float *x, float cut, int begin, int n) {
    for (int i = begin; i < block_end(s, begin); i++) {
        s->col[n] = i;
        s->kept[n] = x[i];
        n += x[i] >= cut;
    }
    return n;
}

/* Every column whose logit is at least `cut`. */
static void collect(struct cpu_sampler *s, const float *x, float cut) {
    int n = 0;
    for (int begin = 0; begin < s->vocab; begin += BLOCK)
        if (block_max(x + begin, block_end(s, begin) - begin) >= cut)
            n = collect_block(s, x, cut, begin, n);
    s->n = n;
}

/* Into the heap whose least value is first, in the place of that one; n values. */
static void replace_least(float *heap, int n, float v) {
    int at = 0;
    for (int child = 1; child < n; child = 2 * at + 1) {
        if (child + 1 < n && heap[child + 1] < heap[child]) child++;
        if (heap[child] >= v) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = v;
}

/* At least k candidates with everything above the lowest of them: the k-th largest of the blocks'
 * maxima is a cut that k columns reach, and few more than those above it in k blocks do. */
static void collect_count(struct cpu_sampler *s, const float *x, int k) {
    int n_blocks = (s->vocab + BLOCK - 1) / BLOCK, n = 0;
    float *top = s->w, *heap = s->kept; /* neither holds anything yet */
    if (k > n_blocks) {
        for (float depth = 4;; depth *= 2) {
            collect(s, x, depth < 200 ? s->max - depth : -INFINITY);
            if (s->n >= k || depth >= 200) return;
        }
    }
    for (int i = 0; i < k; i++) heap[i] = -INFINITY;
    for (int i = 0; i < n_blocks; i++) {
        top[i] = block_max(x + i * BLOCK, block_end(s, i * BLOCK) - i * BLOCK);
        if (top[i] > heap[0]) replace_least(heap, k, top[i]);
    }
    float cut = heap[0];
    for (int i = 0; i < n_blocks; i++)
        if (top[i] >= cut) n = collect_block(s, x, cut, i * BLOCK, n);
    s->n = n;
}

static double weigh(const struct cpu_sampler *s, const float *x, int n, float *w) {
    return s->isa->rowwise->exp_sum(x, n, s->max, s->inv_t, w);
}

/* Candidates that hold `target` of the weight; their weights are computed. */
static void collect_weight(struct cpu_sampler *s, const float *x, double target) {
    for (float depth = 8;; depth *= 1.3f) {
        collect(s, x, depth < 100 ? s->max - depth / s->inv_t : -INFINITY);
        double sum = weigh(s, s->kept, s->n, s->w);
        if (sum >= target || depth >= 100) return;
    }
}

/* Order of floats as unsigned integers; both zeros equal. */
static uint32_t order_key(float x) {
    uint32_t b;
    x += 0.f;
    memcpy(&b, &x, 4);
    return b >> 31 ? ~b : b | 0x80000000u;
}

static void move(struct cpu_sampler *s, int to, int from, bool with_weight) {
    s->col[to] = s->col[from];
    s->kept[to] = s->kept[from];
    if (with_weight) s->w[to] = s->w[from];
}

/* keep_prefix where sorting is cheaper than clearing bins. */
static void keep_prefix_sorted(struct cpu_sampler *s, const float *w, double target) {
    uint32_t key[SORT_BELOW];
    int order[SORT_BELOW], n = 0;
    bool keep[SORT_BELOW] = {false};
    for (int i = 0; i < s->n; i++) {
        uint32_t k = order_key(s->kept[i]);
        int at = i;
        for (; at > 0 && key[at - 1] < k; at--) {
            key[at] = key[at - 1];
            order[at] = order[at - 1];
        }
        key[at] = k;
        order[at] = i;
    }
    double above = 0;
    for (int i = 0; i < s->n && above < target; i++) {
        keep[order[i]] = true;
        above += w ? (double)w[order[i]] : 1;
    }
    for (int i = 0; i < s->n; i++)
        if (keep[i]) move(s, n++, i, w != NULL);
    s->n = n;
}

/* Keep the shortest prefix of the order whose size (w NULL) or weight reaches target; everything
 * where nothing does. */
static void keep_prefix(struct cpu_sampler *s, const float *w, double target) {
    uint32_t prefix = 0;
    double above = 0; /* of keys beyond the prefix */
    static const int shift[] = {21, 10, 0}, bits[] = {11, 11, 10};
    if (s->n <= SORT_BELOW) {
        keep_prefix_sorted(s, w, target);
        return;
    }
    for (int level = 0; level < 3; level++) {
        int n_bins = 1 << bits[level], bin;
        memset(s->bins, 0, (size_t)n_bins * sizeof *s->bins);
        for (int i = 0; i < s->n; i++) {
            uint32_t key = order_key(s->kept[i]);
            if (level && key >> (shift[level] + bits[level]) != prefix) continue;
            s->bins[key >> shift[level] & (uint32_t)(n_bins - 1)] += w ? (double)w[i] : 1;
        }
        for (bin = n_bins - 1; bin >= 0 && above + s->bins[bin] < target; bin--)
            above += s->bins[bin];
        if (bin < 0) return;
        prefix = prefix << bits[level] | (uint32_t)bin;
    }
    int n = 0;
    for (int i = 0; i < s->n; i++) {
        uint32_t key = order_key(s->kept[i]);
        bool keep = key > prefix;
        if (key == prefix && above < target) {
            keep = true;
            above += w ? (double)w[i] : 1;
        }
        move(s, n, i, w != NULL);
        n += keep;
    }
    s->n = n;
}

static void keep_min_p(struct cpu_sampler *s, float min_p) {
    int n = 0;
    for (int i = 0; i < s->n; i++) {
        bool keep = s->w[i] >= min_p;
        move(s, n, i, true);
        n += keep;
    }
    s->n = n;
}

/* ---- The distribution ---------------------------------------------------------------------- */

/* All chance on one column. */
static void keep_one(struct cpu_sampler *s, int col) {
    s->all = false;
    s->n = 1;
    s->col[0] = col;
    s->kept[0] = s->max;
    s->w[0] = 1.f;
    s->x = s->kept;
    s->best = 0;
}

/* Fill the candidates with the filtered distribution's columns and weights; best_col holds the
 * maximum. */
static void filter(struct cpu_sampler *s, const float *x, int best_col,
                   const struct kern_sample *p) {
    float top_p = p->top_p < 0 ? 0.f : p->top_p;
    bool by_k = p->top_k > 0 && p->top_k < s->vocab, by_p = top_p<1.f, by_min = p->min_p> 0.f;
    double sum = 0;
    s->inv_t = fmaxf(1.f / p->temperature, FLT_MIN);
    s->all = !by_k && !by_p && !by_min;
    if (s->all) {
        s->n = s->vocab;
        s->x = x;
        s->best = best_col;
        weigh(s, x, s->vocab, s->w);
        return;
    }
    if (by_k) {
        collect_count(s, x, p->top_k);
        keep_prefix(s, NULL, p->top_k);
        sum = weigh(s, s->kept, s->n, s->w);
    } else if (by_p) {
        sum = weigh(s, x, s->vocab, NULL);
        collect_weight(s, x, (double)top_p * sum);
    } else {
        /* A hair below min_p's own cut; keep_min_p decides. */
        collect(s, x, s->max - (-logf(p->min_p) * 1.001f + 0.01f) / s->inv_t);
        weigh(s, s->kept, s->n, s->w);
    }
    if (by_p) keep_prefix(s, s->w, fmax((double)top_p * sum, DBL_MIN));
    if (by_min) keep_min_p(s, p->min_p < 1.f ? p->min_p : 1.f);
    s->x = s->kept;
    s->best = cpu_sampler_column(s->col, s->n, best_col);
    DASSERT(s->best >= 0); /* the order's first: no filter drops it */
}

bool cpu_sampler_filter(struct cpu_sampler *s, const float *logits, const struct kern_sample *p,
                        const struct kern_history *h) {
    const struct cpu_rowwise_isa *rw = s->isa->rowwise;
    int best;
    /* The raw row first: a ban would hide a NaN. */
    if (!rw->max(logits, s->vocab, &s->max, &best)) return false;
    const float *x = adjust(s, logits, p, h);
    if (x != logits && !rw->max(x, s->vocab, &s->max, &best)) return false;
    if (s->max == -INFINITY) return false;
    if (p->temperature < GREEDY_BELOW) {
        keep_one(s, best);
        return true;
    }
    if (s->max == INFINITY) return false;
    filter(s, x, best, p);
    return true;
}
