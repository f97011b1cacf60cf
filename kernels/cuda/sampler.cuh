#ifndef TANDEM_KERNELS_CUDA_SAMPLER_CUH
#define TANDEM_KERNELS_CUDA_SAMPLER_CUH

/* Private: what sample.cu and accept.cu share. A team of blocks (team.cuh) serves one row of
 * logits: every warp owns a run of 128-column lines, which all passes over the row go through in
 * the same way, so that after the first pass the row comes from L1. filter.cuh turns the row into
 * the distribution that the request asks for, draw.cuh takes a token and gives log-probabilities.
 *
 * Sums decide tokens, so they must not depend on how the row is cut: weights are f32 with the CPU's
 * very bits, and are added up as 64-bit whole numbers, weight * 2^s, s = 62 - log2(columns) rounded
 * up. That is exact in every order, and off by less than 2^-41 of the largest weight a column.
 *
 * All warps of a team hold the same state and take the same branches; what one finds is pushed into
 * every block's shared memory ahead of the team's barrier. */

#include "kernels/cuda/philox.cuh"
#include "kernels/cuda/team.cuh"

enum {
    SAMPLER_LINE = 128, /* columns that a warp looks at together, 4 a lane */
    SAMPLER_BINS = 1024,
    SAMPLER_PATCHES = KERN_MAX_DRAFT + 8, /* recent tokens and bans */
    SAMPLER_MAX_VOCAB = 1 << 21,
    SAMPLER_ALL = 0x7fffffff,
    SAMPLER_WARPS = TEAM_MAX * TEAM_WARPS,
};

/* Counts and weights of bins; a weight's halves are added separately, the lower one's carry by
 * whoever overflows it. */
struct sampler_hist {
    uint32_t count[SAMPLER_BINS], low[SAMPLER_BINS], high[SAMPLER_BINS];
};

/* Of 32 bins together. */
struct sampler_coarse {
    uint64_t weight;
    uint32_t count, pad;
};

struct sampler_bin {
    int bin; /* -1: the target lies beyond all of them; `above` counts everything then */
    uint32_t n_above, n;
    uint64_t above, weight;
};

/* Penalties over one history. */
struct sampler_penalties {
    const uint16_t *prompt, *output; /* NULL: none */
    size_t n_tokens;                 /* that they count */
    float repetition, presence, frequency;
};

struct sampler_shared {
    sampler_penalties penalties;
    sampler_hist hist[3];
    sampler_coarse coarse[3][32];
    uint64_t part[2][SAMPLER_WARPS][2]; /* what each warp of the team tells the others */
    int found[2];                       /* a column */
    sampler_bin bin;
    int patch_col[SAMPLER_PATCHES];
    float patch_x[SAMPLER_PATCHES];
    uint64_t top[32];
    uint32_t n_top;
};

/* A row of logits with the request's changes to them. */
struct sampler_row {
    const float *x;
    int n;
    bool aligned; /* 16-byte loads */
    bool changed; /* penalties or bans: they stand in shared memory */
    bool penalised;
    int n_patches;      /* columns whose value is known */
    const int32_t *ids; /* [n] tokens of the columns; NULL: themselves */
};

template <int TEAM> struct sampler {
    sampler_shared *s;
    int lane, rank, warp; /* warp: in the team */
    int begin, end;       /* its lines */
    int turn;             /* of `part` and `found`: places alternate */
    int which;            /* of `hist`: 1 and 2 alternate */
    float scale;          /* 2^s */
};

template <int TEAM> __device__ static inline sampler<TEAM> sampler_of(sampler_shared *s, int n) {
    sampler<TEAM> m;
    int n_lines = (n + SAMPLER_LINE - 1) / SAMPLER_LINE;
    int per_warp = (n_lines + TEAM * TEAM_WARPS - 1) / (TEAM * TEAM_WARPS);
    m.s = s;
    m.lane = (int)threadIdx.x % 32;
    m.rank = team_rank<TEAM>();
    m.warp = m.rank * TEAM_WARPS + (int)threadIdx.x / 32;
    m.begin = min(m.warp * per_warp, n_lines);
    m.end = min(m.begin + per_warp, n_lines);
    m.turn = 0;
    m.which = 2;
    m.scale = (float)(1ull << (30 + __clz(n))); /* 62 - ceil(log2 n), or one less */
    return m;
}

/* ---- Numbers ------------------------------------------------------------------------------- */

/* Order of floats as unsigned integers; both zeros equal. */
__device__ static inline uint32_t order_key(float x) {
    uint32_t b = __float_as_uint(__fadd_rn(x, 0.f));
    return b >> 31 ? ~b : b | 0x80000000u;
}
__device__ static inline float key_value(uint32_t key) {
    return __uint_as_float(key >> 31 ? key ^ 0x80000000u : ~key);
}

/* e^x for x <= 0: kernels/cpu/vexp.h's v_exp, bit for bit. */
__device__ static inline float weight_exp(float arg) {
    const float magic = 0x1.8p23f;
    float x = fmaxf(arg, -87.33f);
    float n = __fadd_rn(__fadd_rn(__fmul_rn(x, 0x1.715476p0f), magic), -magic);
    float r = __fadd_rn(x, -__fmul_rn(n, 0x1.62e4p-1f));
    r = __fadd_rn(r, -__fmul_rn(n, 0x1.7f7d1cp-20f));
    float p = 0x1.6a235p-10f;
    p = __fadd_rn(__fmul_rn(p, r), 0x1.123a6cp-7f);
    p = __fadd_rn(__fmul_rn(p, r), 0x1.5558f4p-5f);
    p = __fadd_rn(__fmul_rn(p, r), 0x1.55549p-3f);
    p = __fadd_rn(__fmul_rn(p, r), 0x1.fffffcp-2f);
    p = __fadd_rn(r, __fmul_rn(__fmul_rn(r, r), p));
    p = __fadd_rn(p, 1.f);
    p = __fmul_rn(p, __int_as_float((__float2int_rn(n) + 127) << 23));
    return arg < -87.33f ? 0.f : p;
}

__device__ static inline float weight_of(float x, float max, float inv_t) {
    return weight_exp(__fmul_rn(__fadd_rn(x, -max), inv_t));
}

template <int TEAM>
__device__ static inline uint64_t weight_fixed(const sampler<TEAM> &m, float w) {
    return __float2ull_rn(w * m.scale);
}
/* A fixed sum as it would be of f32 weights. */
template <int TEAM>
__device__ static inline double weight_sum(const sampler<TEAM> &m, uint64_t fixed) {
    return __dmul_rn(__ull2double_rn(fixed), (double)__frcp_rn(m.scale));
}

/* A weight as the probability that callers see. */
__device__ static inline float weight_p(float w, double inv_total) {
    return __double2float_rn(__dmul_rn((double)w, inv_total));
}

/* ---- Warps --------------------------------------------------------------------------------- */

__device__ static inline uint64_t warp_sum(uint64_t v) {
    for (int k = 16; k; k /= 2) v += __shfl_xor_sync(0xffffffffu, (unsigned long long)v, k);
    return v;
}
__device__ static inline uint64_t warp_max(uint64_t v) {
    for (int k = 16; k; k /= 2) {
        uint64_t o = __shfl_xor_sync(0xffffffffu, (unsigned long long)v, k);
        v = o > v ? o : v;
    }
    return v;
}
/* Of this lane and those before it. */
__device__ static inline uint64_t warp_prefix(uint64_t v, int lane) {
    for (int k = 1; k < 32; k *= 2) {
        uint64_t o = __shfl_up_sync(0xffffffffu, (unsigned long long)v, k);
        if (lane >= k) v += o;
    }
    return v;
}

/* ---- The row ------------------------------------------------------------------------------- */

/* Column of a token, -1: none. */
__device__ static inline int column_of(const int32_t *ids, int n, int32_t token) {
    if (!ids) return token >= 0 && token < n ? token : -1;
    int low = 0, high = n;
    while (low < high) {
        int mid = low + (high - low) / 2;
        if (ids[mid] < token) low = mid + 1;
        else high = mid;
    }
    return low < n && ids[low] == token ? low : -1;
}

__device__ static inline int32_t token_of(const int32_t *ids, int col) {
    return ids ? ids[col] : col;
}

/* Repetition first, as Hugging Face has it; then OpenAI's two, over the output alone. */
__device__ static inline float penalised(const sampler_penalties &h, float x, bool in_prompt,
                                         int n_output) {
    if (!in_prompt && !n_output) return x;
    x = x > 0 ? __fdiv_rn(x, h.repetition) : __fmul_rn(x, h.repetition);
    if (n_output) x = __fadd_rn(x, -__fadd_rn(h.presence, __fmul_rn(h.frequency, (float)n_output)));
    return x;
}

/* Value of the i-th recent token's column, counted with what is in the history. */
__device__ static inline void patch_recent(sampler_shared *s, const sampler_row &r,
                                           const sampler_penalties &h, const int32_t *recent, int n,
                                           int i) {
    int32_t token = recent[i];
    int col = column_of(r.ids, r.n, token);
    s->patch_col[i] = -1;
    if (col < 0 || (size_t)token >= h.n_tokens) return;
    int n_output = h.output[token];
    for (int j = 0; j < n; j++) n_output += recent[j] == token;
    s->patch_col[i] = col;
    s->patch_x[i] = penalised(h, r.x[col], h.prompt[token] != 0, min(n_output, 65535));
}

/* The row as it is. */
__device__ static inline sampler_row row_of(const float *x, int n, const int32_t *ids) {
    return {x, n, (uint64_t)x % 16 == 0, false, false, 0, ids};
}

/* The changes that params want; h: zeroed or the histories. They are there for every thread after
 * the next barrier of the block. */
__device__ static inline void row_change(sampler_shared *s, sampler_row &r,
                                         const struct kern_sample *p,
                                         const struct kern_history *h) {
    sampler_penalties q = {
        NULL, NULL, h->stride, p->repetition_penalty, p->presence_penalty, p->frequency_penalty};
    int t = (int)threadIdx.x, n_recent = 0, n_banned = min(max(p->n_banned, 0), 8);
    r.penalised = h->output && p->history >= 0 &&
                  (q.repetition != 1.f || q.presence != 0.f || q.frequency != 0.f);
    if (r.penalised) {
        q.prompt = h->prompt + (size_t)p->history * h->stride;
        q.output = h->output + (size_t)p->history * h->stride;
        if (h->recent) n_recent = min(max(p->n_recent, 0), (int)KERN_MAX_DRAFT);
    }
    r.n_patches = n_recent + n_banned;
    r.changed = r.penalised || n_banned > 0;
    if (t == 0) s->penalties = q;
    if (t < n_recent) patch_recent(s, r, q, h->recent + p->first_recent, n_recent, t);
    else if (t < r.n_patches) {
        s->patch_col[t] = column_of(r.ids, r.n, p->banned[t - n_recent]);
        s->patch_x[t] = -INFINITY;
    }
}

/* Columns col..col + 3 as they are; -infinity behind the row's end. */
__device__ static inline void load_raw(const sampler_row &r, int col, float x[4]) {
    if (r.aligned && col + 4 <= r.n) {
        float4 v = *(const float4 *)(r.x + col);
        x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = col + i < r.n ? r.x[col + i] : -INFINITY;
}

/* The request's changes to them. */
__device__ static inline void change(const sampler_shared *s, const sampler_row &r, int col,
                                     float x[4]) {
    if (r.penalised) {
        const sampler_penalties &h = s->penalties;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (col + i >= r.n) continue;
            size_t token = (size_t)token_of(r.ids, col + i);
            if (token < h.n_tokens)
                x[i] = penalised(h, x[i], h.prompt[token] != 0, h.output[token]);
        }
    }
    for (int k = 0; k < r.n_patches; k++) {
        int at = s->patch_col[k] - col;
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (at == i && s->patch_col[k] >= 0) x[i] = s->patch_x[k];
    }
}

/* One column after changes. */
__device__ static inline float load_one(const sampler_shared *s, const sampler_row &r, int col) {
    float x[4];
    load_raw(r, col & ~3, x);
    if (r.changed) change(s, r, col & ~3, x);
    return (col & 2) ? (col & 1) ? x[3] : x[2] : (col & 1) ? x[1] : x[0];
}

/* fn(col, x[4]) for this lane's columns of every line of its warp, all lanes together. */
template <int TEAM, typename F>
__device__ static inline void each_line(const sampler<TEAM> &m, const sampler_row &r, F fn) {
    float next[4];
    int col = m.begin * SAMPLER_LINE + 4 * m.lane;
    if (m.begin < m.end) load_raw(r, col, next);
#pragma unroll 1
    for (int line = m.begin; line < m.end; line++, col += SAMPLER_LINE) {
        float x[4] = {next[0], next[1], next[2], next[3]};
        if (line + 1 < m.end) load_raw(r, col + SAMPLER_LINE, next);
        if (r.changed) change(m.s, r, col, x);
        fn(col, x);
    }
}

/* ---- What warps tell each other ------------------------------------------------------------ */

/* This warp's two numbers to all. */
template <int TEAM>
__device__ static inline void team_tell(sampler<TEAM> &m, uint64_t a, uint64_t b) {
    m.turn ^= 1;
    if (m.lane < TEAM) {
        uint64_t *to = team_at<TEAM>(&m.s->part[m.turn][m.warp][0], m.lane);
        to[0] = a;
        to[1] = b;
    }
    team_sync<TEAM>();
}

/* One warp's column to all; the others hand in -1. */
template <int TEAM> __device__ static inline int team_column(sampler<TEAM> &m, int col) {
    m.turn ^= 1;
    if (col >= 0)
        for (int i = 0; i < TEAM; i++) *team_at<TEAM>(&m.s->found[m.turn], i) = col;
    team_sync<TEAM>();
    return m.s->found[m.turn];
}

struct team_sum {
    uint64_t total, before, own; /* before: of the warps before mine */
    bool flag;                   /* somebody raised it */
};

/* Sum over the team of what each lane has. */
template <int TEAM>
__device__ static inline team_sum team_add(sampler<TEAM> &m, uint64_t mine, bool flag) {
    team_sum t = {0, 0, warp_sum(mine), false};
    team_tell(m, t.own, __any_sync(0xffffffffu, flag));
    for (int w = m.lane; w < TEAM * TEAM_WARPS; w += 32) {
        uint64_t v = m.s->part[m.turn][w][0];
        t.total += v;
        if (w < m.warp) t.before += v;
        t.flag |= m.s->part[m.turn][w][1] != 0;
    }
    t.total = warp_sum(t.total);
    t.before = warp_sum(t.before);
    t.flag = __any_sync(0xffffffffu, t.flag);
    return t;
}

/* The first column at which the running sum of value(col, x, v[4]) passes `target` < t.total; t is
 * team_add of the same values. */
template <int TEAM, typename F>
__device__ static inline int team_find(sampler<TEAM> &m, const sampler_row &r, const team_sum &t,
                                       uint64_t target, F value) {
    int found = -1;
    if (t.before <= target && target - t.before < t.own) {
        uint64_t below = t.before;
        bool done = false;
        each_line(m, r, [&](int col, float *x) {
            uint64_t v[4];
            if (done) return;
            value(col, x, v);
            uint64_t mine = v[0] + v[1] + v[2] + v[3], run = below + warp_prefix(mine, m.lane);
            below = __shfl_sync(0xffffffffu, (unsigned long long)run, 31);
            done = below > target;
            run -= mine;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (run <= target && run + v[i] > target) found = col + i;
                run += v[i];
            }
        });
    }
    return team_column(m, found);
}

/* ---- Its best column ----------------------------------------------------------------------- */

struct row_best {
    bool nan;      /* the row, as it is or changed, holds one */
    int col;       /* of the largest logit, the lowest among equals; -1: all are -infinity */
    float max;     /* that logit */
    float raw_max; /* of the row as it is */
};

struct lane_best {
    float x, raw;
    int col;
    bool nan;
};

__device__ static inline void look_raw(lane_best &b, const float x[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        b.nan |= x[i] != x[i];
        b.raw = fmaxf(b.raw, x[i]);
    }
}
__device__ static inline void look(lane_best &b, int col, const float x[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        b.nan |= x[i] != x[i];
        if (x[i] > b.x) b.x = x[i], b.col = col + i;
    }
}

enum { SCAN_AHEAD = 8 };

/* Eight lines at once: the row comes from L2, and every load is on its way before the first is
 * looked at. */
template <int TEAM>
__device__ static inline void load_ahead(const sampler<TEAM> &m, const sampler_row &r, int line,
                                         float x[SCAN_AHEAD][4]) {
#pragma unroll
    for (int j = 0; j < SCAN_AHEAD; j++)
        load_raw(r, line + j < m.end ? (line + j) * SAMPLER_LINE + 4 * m.lane : r.n, x[j]);
}

template <int TEAM>
__device__ static inline void scan_plain(const sampler<TEAM> &m, const sampler_row &r,
                                         float x[SCAN_AHEAD][4], lane_best &b) {
    for (int line = m.begin;;) {
        int col = line * SAMPLER_LINE + 4 * m.lane;
#pragma unroll
        for (int j = 0; j < SCAN_AHEAD; j++) look(b, col + j * SAMPLER_LINE, x[j]);
        line += SCAN_AHEAD;
        if (line >= m.end) break;
        load_ahead(m, r, line, x);
    }
    b.raw = b.x;
}

/* first: what load_ahead has of the warp's first lines. */
template <int TEAM>
__device__ static inline row_best row_scan(sampler<TEAM> &m, const sampler_row &r,
                                           float first[SCAN_AHEAD][4]) {
    lane_best b = {-INFINITY, -INFINITY, 0, false};
    if (!r.changed) scan_plain(m, r, first, b);
    else {
#pragma unroll 1
        for (int line = m.begin; line < m.end; line++) {
            float x[4];
            int col = line * SAMPLER_LINE + 4 * m.lane;
            load_raw(r, col, x);
            look_raw(b, x);
            change(m.s, r, col, x);
            look(b, col, x);
        }
    }
    uint64_t best = (uint64_t)order_key(b.x) << 32 | (uint32_t)~b.col;
    best = warp_max(best);
    uint64_t raw = warp_max((uint64_t)b.nan << 32 | order_key(b.raw));
    team_wait<TEAM>(); /* the blocks' arrival: all are there to be told */
    team_tell(m, best, raw);
    best = raw = 0;
    for (int w = m.lane; w < TEAM * TEAM_WARPS; w += 32) {
        uint64_t a = m.s->part[m.turn][w][0], c = m.s->part[m.turn][w][1];
        best = a > best ? a : best;
        raw = c > raw ? c : raw;
    }
    best = warp_max(best);
    raw = warp_max(raw);
    row_best out;
    out.nan = raw >> 32 != 0;
    out.max = key_value((uint32_t)(best >> 32));
    out.raw_max = key_value((uint32_t)raw);
    out.col = out.max == -INFINITY ? -1 : (int)~(uint32_t)best;
    return out;
}

#endif
