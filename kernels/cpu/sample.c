/* Sampling on the CPU. Every filter keeps a prefix of one order (higher logit first, lower id first
 * among equals), so nothing is sorted: a threshold is found by counting or weighing the logits'
 * bits, 11 at a time, over the few candidates near the maximum. Ties: top-k keeps exactly k. top-p
 * keeps the shortest prefix that holds top_p of what top-k left, at least one token; min-p keeps
 * weights of at least min_p times the largest.
 *
 * The draw inverts the distribution's sums in order of id at u = (r0 + (r1 + 1/2) / 2^32) / 2^32, r
 * the 32-bit draws 0 and 1 of (seed, position, RNG_SAMPLE). Weights are f32, sums double in an
 * order that the vocabulary alone decides. A temperature below 1e-5 is greedy. A row with NaN, with
 * an infinite largest logit where chance would have to choose, or with every token banned gives
 * token -1. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "base/checked.h"
#include "base/err.h"
#include "base/rng.h"
#include "kernels/cpu/cpu.h"

enum {
    RADIX_BINS = 2048,
    DRAW_CHUNK = 1024,
    MAX_VOCAB = RADIX_BINS * DRAW_CHUNK, /* chunk sums share the bins' space */
    MAX_BANNED = (int)(sizeof((struct kern_sample *)0)->banned / sizeof(int32_t)),
};
static const float GREEDY_BELOW = 1e-5f;

/* A thread's scratch. Candidates stand in order of id. */
struct sampler {
    const struct cpu_rowwise_isa *rw;
    int vocab;
    float *adjusted; /* [vocab] logits after penalties and bans */
    int32_t *id;     /* [vocab] candidates: */
    float *x;        /* their logits */
    float *w;        /* their weights exp((x - max) / T) */
    double *bins;    /* [RADIX_BINS] */
    int n;           /* candidates */
    bool all;        /* every token is one: id and x are not filled */
};

static size_t sampler_bytes(int vocab) {
    return 4 * align_up((size_t)vocab * 4, 64) + RADIX_BINS * sizeof(double);
}

static struct sampler carve(const struct cpu_rowwise_isa *rw, int vocab, void *scratch) {
    size_t part = align_up((size_t)vocab * 4, 64);
    uint8_t *p = scratch;
    return (struct sampler){
        .rw = rw,
        .vocab = vocab,
        .adjusted = (float *)(void *)p,
        .id = (int32_t *)(void *)(p + part),
        .x = (float *)(void *)(p + 2 * part),
        .w = (float *)(void *)(p + 3 * part),
        .bins = (double *)(void *)(p + 4 * part),
    };
}

/* ---- Penalties ----------------------------------------------------------------------------- */

static bool has_penalties(const struct kern_sample *p, const struct kern_history *h) {
    return h && p->history >= 0 &&
           (p->repetition_penalty != 1.f || p->presence_penalty != 0.f ||
            p->frequency_penalty != 0.f);
}

/* Repetition first, as Hugging Face has it: a seen token's positive logit is divided, a negative
 * one multiplied. Then OpenAI's two, over the output alone. */
static void penalise(float *x, int vocab, const struct kern_sample *p,
                     const struct kern_history *h) {
    const uint16_t *prompt = h->prompt + (size_t)p->history * h->stride;
    const uint16_t *output = h->output + (size_t)p->history * h->stride;
    for (int begin = 0; begin < vocab; begin += 32) {
        int end = begin + 32 < vocab ? begin + 32 : vocab;
        unsigned any = 0;
        for (int i = begin; i < end; i++) any |= (unsigned)(prompt[i] | output[i]);
        if (!any) continue;
        for (int i = begin; i < end; i++) {
            if (!prompt[i] && !output[i]) continue;
            x[i] = x[i] > 0 ? x[i] / p->repetition_penalty : x[i] * p->repetition_penalty;
            if (output[i]) x[i] -= p->presence_penalty + p->frequency_penalty * (float)output[i];
        }
    }
}

/* The row's logits as the request wants them: the raw ones where it wants no change. */
static const float *adjust(struct sampler *s, const float *logits, const struct kern_sample *p,
                           const struct kern_history *h) {
    ASSERT(p->n_banned >= 0 && p->n_banned <= MAX_BANNED);
    if (!has_penalties(p, h) && p->n_banned == 0) return logits;
    memcpy(s->adjusted, logits, (size_t)s->vocab * sizeof *logits);
    if (has_penalties(p, h)) penalise(s->adjusted, s->vocab, p, h);
    for (int i = 0; i < p->n_banned; i++)
        if (p->banned[i] >= 0 && p->banned[i] < s->vocab) s->adjusted[p->banned[i]] = -INFINITY;
    return s->adjusted;
}

/* ---- Candidates ---------------------------------------------------------------------------- */

static float block_max(const float *x, int n) {
    float top = -INFINITY;
    for (int i = 0; i < n; i++) top = x[i] > top ? x[i] : top;
    return top;
}

/* Every token whose logit is at least `cut`. */
static void collect(struct sampler *s, const float *x, float cut) {
    int n = 0;
    for (int begin = 0; begin < s->vocab; begin += 32) {
        int end = begin + 32 < s->vocab ? begin + 32 : s->vocab;
        if (!(block_max(x + begin, end - begin) >= cut)) continue;
        /* Without a branch: which ones pass is chance. n never passes i. */
        for (int i = begin; i < end; i++) {
            s->id[n] = i;
            s->x[n] = x[i];
            n += x[i] >= cut;
        }
    }
    s->n = n;
}

/* At least k candidates with everything above the lowest of them. */
static void collect_count(struct sampler *s, const float *x, float max, int k) {
    for (float depth = 4;; depth *= 2) {
        collect(s, x, depth < 200 ? max - depth : -INFINITY);
        if (s->n >= k || depth >= 200) return;
    }
}

/* Candidates that hold `target` of the weight; their weights are computed. */
static void collect_weight(struct sampler *s, const float *x, float max, float inv_t,
                           double target) {
    for (float depth = 8;; depth *= 1.3f) {
        collect(s, x, depth < 100 ? max - depth / inv_t : -INFINITY);
        double sum = s->rw->exp_sum(s->x, s->n, max, inv_t, s->w);
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

/* Keep the shortest prefix of the order whose size (w NULL) or weight reaches target; everything
 * where nothing does. */
static void keep_prefix(struct sampler *s, const float *w, double target) {
    uint32_t prefix = 0;
    double above = 0; /* of keys beyond the prefix */
    static const int shift[] = {21, 10, 0}, bits[] = {11, 11, 10};
    for (int level = 0; level < 3; level++) {
        int n_bins = 1 << bits[level], bin;
        memset(s->bins, 0, (size_t)n_bins * sizeof *s->bins);
        for (int i = 0; i < s->n; i++) {
            uint32_t key = order_key(s->x[i]);
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
        uint32_t key = order_key(s->x[i]);
        bool keep = key > prefix;
        if (key == prefix && above < target) {
            keep = true;
            above += w ? (double)w[i] : 1;
        }
        s->id[n] = s->id[i];
        s->x[n] = s->x[i];
        if (w) s->w[n] = w[i];
        n += keep;
    }
    s->n = n;
}

static void keep_min_p(struct sampler *s, float min_p) {
    int n = 0;
    for (int i = 0; i < s->n; i++) {
        s->id[n] = s->id[i];
        s->x[n] = s->x[i];
        s->w[n] = s->w[i];
        n += s->w[i] >= min_p;
    }
    s->n = n;
}

/* Fill the candidates with the filtered distribution's tokens and weights. */
static void filter(struct sampler *s, const float *x, float max, const struct kern_sample *p) {
    float inv_t = fmaxf(1.f / p->temperature, FLT_MIN), top_p = p->top_p < 0 ? 0.f : p->top_p;
    bool by_k = p->top_k > 0 && p->top_k < s->vocab, by_p = top_p<1.f, by_min = p->min_p> 0.f;
    double sum = 0;
    s->all = !by_k && !by_p && !by_min;
    if (s->all) {
        s->n = s->vocab;
        s->rw->exp_sum(x, s->vocab, max, inv_t, s->w);
    } else if (by_k) {
        collect_count(s, x, max, p->top_k);
        keep_prefix(s, NULL, p->top_k);
        sum = s->rw->exp_sum(s->x, s->n, max, inv_t, s->w);
    } else if (by_p) {
        sum = s->rw->exp_sum(x, s->vocab, max, inv_t, NULL);
        collect_weight(s, x, max, inv_t, (double)top_p * sum);
    } else {
        /* A hair below min_p's own cut; keep_min_p decides. */
        collect(s, x, max - (-logf(p->min_p) * 1.001f + 0.01f) / inv_t);
        s->rw->exp_sum(s->x, s->n, max, inv_t, s->w);
    }
    if (by_p) keep_prefix(s, s->w, fmax((double)top_p * sum, DBL_MIN));
    if (by_min) keep_min_p(s, p->min_p < 1.f ? p->min_p : 1.f);
}

/* ---- Drawing ------------------------------------------------------------------------------- */

/* Sums of chunks to `sums`; returns the total. */
static double chunk_sums(const float *w, int n, double *sums) {
    double total = 0;
    for (int c = 0, begin = 0; begin < n; c++, begin += DRAW_CHUNK) {
        int end = begin + DRAW_CHUNK < n ? begin + DRAW_CHUNK : n, i = begin;
        double lane[8] = {0};
        for (; i + 8 <= end; i += 8)
            for (int j = 0; j < 8; j++) lane[j] += (double)w[i + j];
        for (; i < end; i++) lane[0] += (double)w[i];
        sums[c] = ((lane[0] + lane[4]) + (lane[1] + lane[5])) +
                  ((lane[2] + lane[6]) + (lane[3] + lane[7]));
        total += sums[c];
    }
    return total;
}

/* The first i whose running sum passes u * total; rounding may leave it to the last that weighs
 * something. -1 where nothing does. */
static int draw(const struct sampler *s, double u, double total) {
    double target = u * total, below = 0;
    int begin = 0, last = -1;
    for (int c = 0; begin + DRAW_CHUNK < s->n && below + s->bins[c] <= target; c++) {
        below += s->bins[c];
        begin += DRAW_CHUNK;
    }
    for (int i = begin; i < s->n; i++) {
        if (!(s->w[i] > 0)) continue;
        last = i;
        below += (double)s->w[i];
        if (below > target) return i;
    }
    for (int i = begin - 1; last < 0 && i >= 0; i--)
        if (s->w[i] > 0) last = i;
    return last;
}

static double uniform(const struct kern_sample *p) {
    double r0 = rng_u32(p->seed, (uint64_t)p->position, RNG_SAMPLE, 0);
    double r1 = rng_u32(p->seed, (uint64_t)p->position, RNG_SAMPLE, 1);
    return (r0 + (r1 + 0.5) * 0x1p-32) * 0x1p-32;
}

/* The row's token, -1 where there is none; probs (NULL: not) gets the distribution. */
static int choose(struct sampler *s, const float *x, const struct kern_sample *p, float *probs) {
    float max;
    int best;
    if (probs) memset(probs, 0, (size_t)s->vocab * sizeof *probs);
    if (!s->rw->max(x, s->vocab, &max, &best) || max == -INFINITY) return -1;
    if (p->temperature < GREEDY_BELOW) {
        if (probs) probs[best] = 1.f;
        return best;
    }
    if (max == INFINITY) return -1;
    filter(s, x, max, p);
    double total = chunk_sums(s->w, s->n, s->bins);
    int i = draw(s, uniform(p), total);
    if (probs)
        for (int c = 0; c < s->n; c++)
            probs[s->all ? c : s->id[c]] = (float)((double)s->w[c] / total);
    return i < 0 || s->all ? i : s->id[i];
}

/* ---- Log-probabilities --------------------------------------------------------------------- */

/* The n best of the raw logits, lower ids first among equals, by insertion: few pass the last one.
 */
static void top_logprobs(const float *x, int vocab, int n, double log_sum,
                         struct kern_sampled *out) {
    int n_have = 0;
    float best[KERN_MAX_LOGPROBS];
    for (int i = 0; i < vocab && n > 0; i++) {
        if (i % 32 == 0 && n_have == n) {
            while (vocab - i >= 32 && !(block_max(x + i, 32) > best[n - 1])) i += 32;
            if (i == vocab) break;
        }
        if (n_have == n && !(x[i] > best[n - 1])) continue;
        int at = n_have < n ? n_have++ : n - 1;
        for (; at > 0 && x[i] > best[at - 1]; at--) {
            best[at] = best[at - 1];
            out->top_id[at] = out->top_id[at - 1];
        }
        best[at] = x[i];
        out->top_id[at] = i;
    }
    for (int i = 0; i < KERN_MAX_LOGPROBS; i++) {
        if (i >= n_have) out->top_id[i] = -1;
        out->top_logprob[i] = i < n_have ? (float)((double)best[i] - log_sum) : -INFINITY;
    }
}

static void logprobs(const struct sampler *s, const float *logits, float max,
                     const struct kern_sample *p, struct kern_sampled *out) {
    int n = p->n_logprobs < 0 ? 0 : p->n_logprobs;
    if (n > KERN_MAX_LOGPROBS) n = KERN_MAX_LOGPROBS;
    double log_sum = (double)max + log(s->rw->exp_sum(logits, s->vocab, max, 1.f, NULL));
    out->logprob = (float)((double)logits[out->token] - log_sum);
    top_logprobs(logits, s->vocab, n, log_sum, out);
}

/* ---- The operation ------------------------------------------------------------------------- */

struct sample_job {
    const struct cpu_ctx *c;
    int n_rows, vocab;
    const float *logits;
    size_t stride;
    const struct kern_sample *params;
    const struct kern_history *history;
    uint8_t *scratch;
    struct kern_sampled *out;
    float *probs;
};

static void sample_row(const struct sample_job *j, struct sampler *s, int row) {
    const struct kern_sample *p = &j->params[row];
    const float *logits = j->logits + (size_t)row * j->stride;
    float *probs = j->probs ? j->probs + (size_t)row * (size_t)j->vocab : NULL;
    struct kern_sampled *out = &j->out[row];
    float max;
    int best;
    memset(out, 0, sizeof *out);
    out->token = -1;
    if (!s->rw->max(logits, j->vocab, &max, &best)) {
        if (probs) memset(probs, 0, (size_t)j->vocab * sizeof *probs);
        return;
    }
    out->token = choose(s, adjust(s, logits, p, j->history), p, probs);
    if (out->token >= 0 && (p->want_logprob || p->n_logprobs > 0)) logprobs(s, logits, max, p, out);
}

static void sample_share(void *arg, int idx, int n_threads) {
    const struct sample_job *j = arg;
    struct sampler s =
        carve(j->c->isa->rowwise, j->vocab, j->scratch + (size_t)idx * sampler_bytes(j->vocab));
    int begin, end;
    threads_split(j->n_rows, 1, idx, n_threads, &begin, &end);
    for (int row = begin; row < end; row++) sample_row(j, &s, row);
}

size_t kern_cpu_sample_scratch_bytes(const struct kern *k, int n_rows, int vocab) {
    (void)n_rows;
    return (size_t)threads_n(cpu_ctx(k)->threads) * sampler_bytes(vocab);
}

int kern_cpu_sample(struct kern *k, int n_rows, int vocab, const float *logits, size_t stride,
                    const struct kern_sample *params, const struct kern_history *history,
                    void *scratch, struct kern_sampled *out, float *probs) {
    const struct cpu_ctx *c = cpu_ctx(k);
    ASSERT(vocab > 0 && vocab <= MAX_VOCAB && stride >= (size_t)vocab);
    struct sample_job j = {c, n_rows, vocab, logits, stride, params, history, scratch, out, probs};
    if (n_rows == 1) sample_share(&j, 0, 1);
    else if (n_rows > 1) threads_run(c->threads, sample_share, &j);
    return 0;
}
