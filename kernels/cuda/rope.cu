/* Bias, per-head norm and rotation of q and k, then k and v into their page slots.
 *
 * A row of the 8B shape moves 24 KB in and 24 KB out; 4,096 rows: 200 MB, 47 us at 4.3 TB/s. One
 * row is bound by latency.
 *
 * A row's work is a list of heads: KV heads' k, then their v, then q. A block takes a stretch of
 * one row's list: few rows are cut into many blocks, many rows get a block each. The angles are
 * computed once a block: reduction by pi/2 in double (position * inv_freq as the CPU has it, exact
 * to 1e-16), polynomials of the remainder in f32, which err by an ulp; they lie in shared memory
 * for all heads, before the product's rows are waited for. A team of 8, 16 or 32 lanes takes a
 * head, 4 neighbouring elements a lane and turn; the other element of a pair comes through shared
 * memory. The next head is loaded before the current one is worked on. Heads are independent and a
 * head's sum follows from head_dim alone, so that no cut changes a bit. */
#include <string.h>

#include "base/half.h"
#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/page.cuh"

enum { THREADS = 256 };

/* Where the other element of a pair is: in the same quad, in another whole quad, or anywhere. */
enum pairing { PAIR_INSIDE, PAIR_QUADS, PAIR_ANYWHERE };

struct rope_args {
    int n_heads, n_kv, head_dim, dim, team; /* team: lanes a head */
    bool interleaved, bf16;
    enum pairing pairing;
    /* Weights. */
    const float *inv_freq, *q_norm, *k_norm, *q_bias, *k_bias, *v_bias;
    float scale, eps;
    /* Contents. */
    const int32_t *position, *row_seq, *slot_page;
    float *qkv;
    uint8_t *base;
    size_t page_stride, k_offset, v_offset, head_stride;
};

/* cos and sin of position * freq. The quotient q stays below 2^26 for any position below 2^26, so
 * that q times each of pi/2's first two parts is exact. Taylor terms up to r^9 and r^10 leave 2e-9
 * on [-pi/4, pi/4]. */
__device__ static float2 turn(int position, float freq, float scale) {
    const double magic = 0x1.8p52;
    double a = (double)position * (double)freq;
    double turns = fma(a, 0x1.45f306dc9c883p-1, magic), q = turns - magic;
    double rest = fma(-q, 0x1.921fb54p0, a);
    rest = fma(-q, 0x1.10b461p-30, rest);
    rest = fma(-q, 0x1.a62633145c06ep-58, rest);
    float r = (float)rest, z = r * r;
    float s = fmaf(z, 0x1.71de3ap-19f, -0x1.a01a02p-13f);
    s = fmaf(s, z, 0x1.111112p-7f);
    s = fmaf(s, z, -0x1.555556p-3f);
    s = fmaf(r * z, s, r);
    float c = fmaf(z, -0x1.27e4fcp-22f, 0x1.a01a02p-16f);
    c = fmaf(c, z, -0x1.6c16c2p-10f);
    c = fmaf(c, z, 0x1.555556p-5f);
    c = fmaf(c, z, -0.5f);
    c = fmaf(c, z, 1.f);
    int quadrant = __double2loint(turns) & 3;
    float x = quadrant & 1 ? -s : c, y = quadrant & 1 ? c : s;
    float sign = quadrant & 2 ? -scale : scale;
    return make_float2(x * sign, y * sign);
}

/* What a lane has of its team's head: quad `lane + i * team` in v[i]. */
template <int TURNS> struct part { float4 v[TURNS]; };

/* Item `idx` of the row's list: where its head begins in qkv's row. */
__device__ static inline int head_at(const rope_args &a, int idx) {
    int n_k = 2 * a.n_kv;
    return (idx < n_k ? a.n_heads + idx : idx - n_k) * a.head_dim;
}

template <int TURNS>
__device__ static inline part<TURNS> load_head(const rope_args &a, const float *row, int idx,
                                               bool live, int lane) {
    part<TURNS> h;
    const float *x = row + (live ? head_at(a, idx) : 0);
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        int at = 4 * (lane + i * a.team);
        h.v[i] =
            live && at < a.head_dim ? *(const float4 *)(x + at) : make_float4(0.f, 0.f, 0.f, 0.f);
    }
    return h;
}

template <int TURNS>
__device__ static inline void add_bias(const rope_args &a, part<TURNS> &h, const float *bias,
                                       int lane) {
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        int at = 4 * (lane + i * a.team);
        if (at >= a.head_dim) continue;
        h.v[i].x += bias[at];
        h.v[i].y += bias[at + 1];
        h.v[i].z += bias[at + 2];
        h.v[i].w += bias[at + 3];
    }
}

/* RMSNorm over the team's head where it is wanted; every lane of the warp comes here. */
template <int TURNS>
__device__ static inline void norm_head(const rope_args &a, part<TURNS> &h, const float *weight,
                                        int lane) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        sum = fmaf(h.v[i].x, h.v[i].x, sum);
        sum = fmaf(h.v[i].y, h.v[i].y, sum);
        sum = fmaf(h.v[i].z, h.v[i].z, sum);
        sum = fmaf(h.v[i].w, h.v[i].w, sum);
    }
    for (int d = a.team / 2; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    float scale = rsqrtf(sum / (float)a.head_dim + a.eps);
    if (!weight) return;
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        int at = 4 * (lane + i * a.team);
        if (at >= a.head_dim) continue;
        h.v[i].x *= scale * weight[at];
        h.v[i].y *= scale * weight[at + 1];
        h.v[i].z *= scale * weight[at + 2];
        h.v[i].w *= scale * weight[at + 3];
    }
}

/* The pair (x, y) turned: first is what x becomes, second y. */
__device__ static inline float first_of(float x, float y, float c, float s) {
    return fmaf(x, c, -(y * s));
}
__device__ static inline float second_of(float x, float y, float c, float s) {
    return fmaf(x, s, y * c);
}

/* Element i of a head whose elements are in `all`, as it is after the rotation. */
__device__ static inline float turned(const rope_args &a, const float *all, const float *cos,
                                      const float *sin, int i) {
    int half = a.dim / 2;
    if (i >= a.dim) return all[i];
    if (a.interleaved) {
        float x = all[i & ~1], y = all[i | 1];
        return i % 2 ? second_of(x, y, cos[i / 2], sin[i / 2])
                     : first_of(x, y, cos[i / 2], sin[i / 2]);
    }
    if (i < half) return first_of(all[i], all[i + half], cos[i], sin[i]);
    return second_of(all[i - half], all[i], cos[i - half], sin[i - half]);
}

/* The same of a whole quad at i that holds two pairs. */
__device__ static inline float4 turned_inside(const rope_args &a, float4 v, const float *cos,
                                              const float *sin, int i) {
    if (i >= a.dim) return v;
    float2 c = *(const float2 *)(cos + i / 2), s = *(const float2 *)(sin + i / 2);
    return make_float4(first_of(v.x, v.y, c.x, s.x), second_of(v.x, v.y, c.x, s.x),
                       first_of(v.z, v.w, c.y, s.y), second_of(v.z, v.w, c.y, s.y));
}

/* The same of a whole quad at i, where no quad holds elements of two halves. */
__device__ static inline float4 turned_quad(const rope_args &a, float4 v, const float *all,
                                            const float *cos, const float *sin, int i) {
    int half = a.dim / 2, pair = i < half ? i : i - half;
    if (i >= a.dim) return v;
    float4 o = *(const float4 *)(all + (i < half ? i + half : i - half));
    float4 c = *(const float4 *)(cos + pair), s = *(const float4 *)(sin + pair);
    if (i < half)
        return make_float4(first_of(v.x, o.x, c.x, s.x), first_of(v.y, o.y, c.y, s.y),
                           first_of(v.z, o.z, c.z, s.z), first_of(v.w, o.w, c.w, s.w));
    return make_float4(second_of(o.x, v.x, c.x, s.x), second_of(o.y, v.y, c.y, s.y),
                       second_of(o.z, v.z, c.z, s.z), second_of(o.w, v.w, c.w, s.w));
}

/* Rotation where it is wanted. `all`: the team's own head_dim elements of shared memory. Every lane
 * of the warp comes here. */
template <int TURNS>
__device__ static inline void turn_head(const rope_args &a, part<TURNS> &h, float *all,
                                        const float *cos, const float *sin, bool wanted, int lane) {
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        int at = 4 * (lane + i * a.team);
        if (at < a.head_dim && a.pairing != PAIR_INSIDE) *(float4 *)(all + at) = h.v[i];
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        int at = 4 * (lane + i * a.team);
        if (at >= a.head_dim || !wanted) continue;
        if (a.pairing == PAIR_INSIDE) h.v[i] = turned_inside(a, h.v[i], cos, sin, at);
        else if (a.pairing == PAIR_QUADS) h.v[i] = turned_quad(a, h.v[i], all, cos, sin, at);
        else
            h.v[i] =
                make_float4(turned(a, all, cos, sin, at), turned(a, all, cos, sin, at + 1),
                            turned(a, all, cos, sin, at + 2), turned(a, all, cos, sin, at + 3));
    }
    __syncwarp(); /* the next head overwrites `all` */
}

/* The head's row of a plane in the page: place t. Two quads are one chunk of page.cuh. */
template <int TURNS>
__device__ static inline void store_page(const rope_args &a, const part<TURNS> &h, uint8_t *plane,
                                         int t, int lane) {
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        int at = 4 * (lane + i * a.team);
        if (at < a.head_dim)
            *(uint2 *)(plane + 2 * (size_t)page_at(t, at, a.head_dim)) =
                to_act_quad(h.v[i], a.bf16);
    }
}

template <int TURNS>
__device__ static inline void store_row(const rope_args &a, const part<TURNS> &h, float *x,
                                        int lane) {
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        int at = 4 * (lane + i * a.team);
        if (at < a.head_dim) *(float4 *)(x + at) = h.v[i];
    }
}

/* One item. Teams without one (live false) go along for the shuffles. */
template <int TURNS>
__device__ static inline void do_head(const rope_args &a, part<TURNS> &h, int idx, bool live,
                                      float *row, uint8_t *page, int t, float *all,
                                      const float *cos, const float *sin, int lane) {
    bool is_k = idx < a.n_kv, is_v = !is_k && idx < 2 * a.n_kv;
    int head = is_k ? idx : is_v ? idx - a.n_kv : idx - 2 * a.n_kv;
    const float *bias = is_k ? a.k_bias : is_v ? a.v_bias : a.q_bias;
    const float *norm = is_k ? a.k_norm : is_v ? NULL : a.q_norm;
    if (bias && live) add_bias(a, h, bias + (size_t)head * a.head_dim, lane);
    if (a.q_norm || a.k_norm) norm_head(a, h, norm, lane);
    if (a.inv_freq && (a.team < 32 || !is_v)) turn_head(a, h, all, cos, sin, !is_v, lane);
    if (!live) return;
    if (!is_v) store_row(a, h, row + head_at(a, idx), lane);
    if (page && (is_k || is_v))
        store_page(a, h, page + (is_k ? a.k_offset : a.v_offset) + head * a.head_stride, t, lane);
}

/* Grid (stretches of a row's list, rows). */
template <int TURNS>
__global__ void __launch_bounds__(THREADS, TURNS == 1 ? 5 : 3)
    rope_kv_kernel(const rope_args a, int stretch) {
    __shared__ __align__(16) float cos[KERN_MAX_HEAD_DIM / 2], sin[KERN_MAX_HEAD_DIM / 2];
    __shared__ __align__(16) float slots[THREADS * 4 * TURNS];
    pdl_trigger();
    int row_idx = blockIdx.y, n_teams = THREADS / a.team, team = threadIdx.x / a.team;
    int lane = threadIdx.x % a.team, n_items = a.n_heads + 2 * a.n_kv;
    int begin = blockIdx.x * stretch, end = min(begin + stretch, n_items);
    /* Contents that no kernel of the pass writes: cuda.cuh. */
    int position = __ldcg(a.position + row_idx), slot = __ldcg(a.slot_page + row_idx);
    bool idle = __ldcg(a.row_seq + row_idx) < 0;
    if (a.inv_freq && threadIdx.x < a.dim / 2) {
        float2 cs = turn(position, a.inv_freq[threadIdx.x], a.scale);
        cos[threadIdx.x] = cs.x;
        sin[threadIdx.x] = cs.y;
    }
    pdl_wait();
    if (idle) return; /* the whole block */
    float *row = a.qkv + (size_t)row_idx * n_items * a.head_dim;
    int idx = begin + team;
    bool live = idx < end;
    part<TURNS> h = load_head<TURNS>(a, row, idx, live, lane);
    uint8_t *page = slot < 0 ? NULL : a.base + (size_t)slot * a.page_stride;
    float *all = slots + (size_t)team * 4 * TURNS * a.team;
    __syncthreads();
    for (int first = begin; first < end; first += n_teams) { /* all teams alike */
        int next = first + n_teams + team;
        bool next_live = next < end;
        part<TURNS> then = load_head<TURNS>(a, row, next, next_live, lane);
        do_head(a, h, first + team, live, row, page, position & (KERN_BLOCK - 1), all, cos, sin,
                lane);
        h = then;
        live = next_live;
    }
}

/* Items a block takes: one a team where that fits the device at once, else the whole row. */
static int stretch_of(const struct cuda_ctx *c, int n_rows, int n_items, int n_teams) {
    int blocks = (n_items + n_teams - 1) / n_teams;
    return n_rows * blocks <= 6 * c->n_sms ? n_teams : n_items;
}

int kern_cuda_rope_kv(struct kern *k, const struct kern_batch *b, const struct kern_rope *rope,
                      int n_heads, float *qkv, const struct kern_kv *kv) {
    struct cuda_ctx *c = cuda_ctx(k);
    int n_rows = b->rows.n_gen + b->rows.n_prompt, n_items = n_heads + 2 * kv->n_kv_heads;
    ASSERT(n_rows >= 0 && n_rows <= KERN_MAX_ROWS && n_heads > 0 && kv->n_kv_heads > 0);
    ASSERT(rope->dim >= 0 && rope->dim <= kv->head_dim && rope->dim % 2 == 0);
    ASSERT(qkv && (uintptr_t)qkv % 16 == 0);
    if (kv->dtype != KERN_F16 && kv->dtype != KERN_BF16) return E_UNSUPPORTED;
    if (kv->head_dim <= 0 || kv->head_dim > KERN_MAX_HEAD_DIM || kv->head_dim % 16)
        return E_UNSUPPORTED;
    if (n_rows == 0) return 0;
    rope_args a = {};
    a.n_heads = n_heads;
    a.n_kv = kv->n_kv_heads;
    a.head_dim = kv->head_dim;
    a.dim = rope->dim;
    a.team = kv->head_dim <= 32 ? 8 : kv->head_dim <= 64 ? 16 : 32;
    a.interleaved = rope->interleaved;
    a.pairing = rope->interleaved && rope->dim % 4 == 0    ? PAIR_INSIDE
                : !rope->interleaved && rope->dim % 8 == 0 ? PAIR_QUADS
                                                           : PAIR_ANYWHERE;
    a.bf16 = kv->dtype == KERN_BF16;
    a.inv_freq = rope->dim ? rope->inv_freq : NULL;
    a.q_norm = rope->q_norm;
    a.k_norm = rope->k_norm;
    a.q_bias = rope->q_bias;
    a.k_bias = rope->k_bias;
    a.v_bias = rope->v_bias;
    a.scale = rope->scale;
    a.eps = rope->norm_eps;
    a.position = b->position;
    a.row_seq = b->row_seq;
    a.slot_page = b->slot_page;
    a.qkv = qkv;
    a.base = (uint8_t *)kv->base;
    a.page_stride = kv->page_stride;
    a.k_offset = kv->k_offset;
    a.v_offset = kv->v_offset;
    a.head_stride = kv->head_stride;
    int stretch = stretch_of(c, n_rows, n_items, THREADS / a.team);
    dim3 grid((n_items + stretch - 1) / stretch, n_rows);
    if (a.head_dim <= 4 * a.team)
        return CUDA_LAUNCH(c, rope_kv_kernel<1>, grid, THREADS, 0, a, stretch);
    return CUDA_LAUNCH(c, rope_kv_kernel<2>, grid, THREADS, 0, a, stretch);
}

void kern_cuda_read_kv(const void *page_plane, enum kern_dtype t, int head_dim, float *out) {
    const uint8_t *plane = (const uint8_t *)page_plane;
    ASSERT(t == KERN_F16 || t == KERN_BF16);
    for (int token = 0; token < KERN_BLOCK; token++)
        for (int i = 0; i < head_dim; i++) {
            uint16_t bits;
            memcpy(&bits, plane + 2 * (size_t)page_at(token, i, head_dim), sizeof bits);
            *out++ = t == KERN_F16 ? f16_to_f32(bits) : bf16_to_f32(bits);
        }
}
