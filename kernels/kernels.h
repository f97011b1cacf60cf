#ifndef TANDEM_KERNELS_H
#define TANDEM_KERNELS_H

/* The operations of a forward pass, behind one table that a backend fills: kernels/cpu/<op>.c and
 * kernels/cuda/<op>.cu are twins, chosen at run time, both in one process where there is a GPU.
 *
 * Two promises hold for every operation:
 *
 * One row, one result. A row's bits depend neither on how many rows share the call, nor on the
 * batch, the chunk or the number of threads. Which kernel serves a row follows from its class
 * (generated or prompt), never from a count; sums run in one order; attention reduces over an
 * aligned binary tree.
 *
 * Ready for graphs. Host arguments are capacities and pointers; contents (token ids, positions,
 * slots, block lists) are arrays in the backend's memory. An operation enqueues on the backend's
 * stream and does not wait (the CPU backend has finished when it returns); nothing inside a round
 * needs a host read. Nothing allocates: scratch is handed in.
 *
 * Row order: a batch holds its n_gen generated rows first, then its n_prompt prompt rows. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct err;
struct kern; /* a backend's context: threads or streams, its memory */

/* ---- Types --------------------------------------------------------------------------------- */

/* Element types of weights and caches. The quantised ones are ggml's block formats (32 or 256
 * weights a block, docs in kernels/cpu/formats.h). Values are ours; files map theirs. */
enum kern_dtype {
    KERN_F32,
    KERN_F16,
    KERN_BF16,
    KERN_Q8_0,
    KERN_Q4_0,
    KERN_Q4_1,
    KERN_Q5_0,
    KERN_Q5_1,
    KERN_Q4_K,
    KERN_Q5_K,
    KERN_Q6_K,
    KERN_N_DTYPES
};

const char *kern_dtype_name(enum kern_dtype t); /* "Q4_1" */
int kern_dtype_block(enum kern_dtype t);        /* weights a block: 1, 32 or 256 */
size_t kern_dtype_block_bytes(enum kern_dtype t);
/* Bytes of n weights in file layout; n must be a multiple of the block. */
size_t kern_dtype_bytes(enum kern_dtype t, size_t n);
/* Write n weights of a file's bytes as f32 (plain C, exact; n a multiple of the block). */
void kern_dequantize(enum kern_dtype t, const void *src, float *dst, size_t n);

/* Bytes of one token's K, or V, of one head in a cache of type t (0: no cache is of it); a head's K
 * or V of a block takes KERN_BLOCK times that. Q8_0: a byte an element, head_dim rounded up to 4,
 * and an f16 scale for every 32 of them (the last ones may be fewer). */
size_t kern_kv_token_bytes(enum kern_dtype t, int head_dim);

enum {
    KERN_BLOCK = 64,   /* tokens of a KV block (page) */
    KERN_QUARTER = 16, /* tokens of a quarter of a block */
    KERN_LEAF = 512,   /* tokens of a leaf of attention's tree: 8 list entries */
    KERN_MAX_HEAD_DIM = 256,
    KERN_MAX_ROWS = 4096,  /* rows of one pass */
    KERN_ACT_ALIGN = 64,   /* alignment of every buffer */
    KERN_MAX_GROUP = 64,   /* query heads per KV head */
    KERN_MAX_LISTS = 1024, /* lists of one call of attention, where KV heads have their own */
};

/* How products are computed on the CPU backend. FAST: quantised weights against 8-bit activations
 * (32 a scale), prompt rows by matrix units where the machine has them. REFERENCE: weights
 * dequantised to f32 products, sums in double, the twin that everything is checked against; KV is
 * f32. */
enum kern_precision { KERN_FAST, KERN_REFERENCE };

/* One matrix in the backend's own layout, [rows][cols] as y = W x: rows outputs, cols inputs. */
struct kern_weight {
    const void *data; /* backend memory, 64-byte aligned, kern_ops.weight_bytes bytes */
    enum kern_dtype dtype;
    int rows, cols;
    size_t bytes; /* of `data` */
    /* The matrix whose product usually follows, or NULL: a hint, by which a backend may begin to
     * read it. It outlives this one. */
    const struct kern_weight *next;
};

/* How many rows of which class a call serves. Rows are consecutive in every buffer. */
struct kern_rows {
    int n_gen;    /* generated (decode and verify) rows, first */
    int n_prompt; /* prompt rows, behind them */
};

/* Packed activations: rows of one product's input in the form that the backend multiplies (8-bit
 * with scales, bf16 tiles, or plain f32). Opaque bytes in backend memory, made by norm_pack, pack
 * or gate_pack and read by matmul of the same kern_rows and cols. */
struct kern_act {
    void *data;
    size_t bytes;            /* capacity; see act_bytes */
    enum kern_dtype partner; /* type of the weights that will be multiplied: a backend may pack
                                differently for each; others work all the same, perhaps slower */
};

/* ---- Attention's view of paged KV ---------------------------------------------------------- */

/* Where a layer's keys and values live inside a page: the page of id p begins at base + p *
 * page_stride (the pool's ids count units of 1,024 bytes, so page_stride is that unit); this
 * layer's K of head h at + k_offset + h * head_stride, V at + v_offset + h * head_stride. K and V
 * of one head and block are KERN_BLOCK x head_dim elements; the order inside is the backend's own
 * (the CPU backend keeps K as [head_dim][64], V as [64][head_dim], 8-bit ones as
 * kernels/cpu/attention_q8.h says; CUDA: kernels/cuda/page.cuh). */
struct kern_kv {
    void *base;                             /* backend memory */
    size_t page_stride;                     /* bytes */
    size_t k_offset, v_offset, head_stride; /* bytes */
    enum kern_dtype dtype;                  /* one of kern_device_info.kv_types */
    int n_kv_heads, head_dim;
};

/* The rows of a pass, as arrays in backend memory. Rows of one sequence are consecutive within
 * their class; a sequence may have none. An idle row (row_seq -1) belongs to no sequence: its
 * token is -1, nothing is written for it, attention gives zeros. A sequence's block list names the
 * pages that its rows read, ascending in position, each entry full but possibly the last ones. A
 * row sees list tokens at positions <= its own. */
struct kern_batch {
    struct kern_rows rows;     /* capacities = counts on the CPU backend */
    const int32_t *token;      /* [n_rows] ids */
    const int32_t *position;   /* [n_rows] */
    const int32_t *row_seq;    /* [n_rows] index into the sequence arrays; -1: idle row */
    const int32_t *slot_page;  /* [n_rows] page id that takes the row's K and V */
    int n_seqs;                /* capacity = count */
    const int32_t *seq_row;    /* [n_seqs] first row */
    const int32_t *seq_n_rows; /* [n_seqs] */
};

/* Block lists of all sequences for one layer: those of a group of layers, or with strides a layer's
 * own, or each of its KV heads'. */
struct kern_lists {
    const int32_t *page;     /* [..][capacity] page ids */
    const int32_t *block;    /* [..][capacity] block index in the sequence: token positions are
                                block * 64 .. + 63 */
    const int32_t *n_blocks; /* [..] entries used */
    int capacity;            /* entries a list may have */
    int seq_stride;          /* lists between two sequences, 1 where they lie side by side */
    int head_stride;         /* lists between two KV heads: 0 (shared) or 1 */
    /* [..][capacity] bits 0..3: quarters of the block (KERN_QUARTER tokens) that are read; NULL:
     * all. Of generated rows that nothing looks at alone, and of blocks that no row of the pass
     * lies in: elsewhere 15. Where kern_device_info.quarters. */
    const uint8_t *quarters;
    /* Rows, lists, heads and scratch are those of the attention before, in the same pass: a layer
     * after another of its group. What the backend found out about them then may serve again. */
    bool repeated;
};

/* Optional outputs of attention. Zero: none. */
struct kern_attn_taps {
    /* [lines][capacity] f32, zeroed by the caller: attention mass of each list entry, maximum over
     * heads and over the rows of one line. SparDA's `observed` selection and labels. */
    float *mass;
    /* [n_rows] line of `mass` that takes the row's masses; -1: the row is not looked at. Rows of
     * several sequences share no line. Looking changes no bit of `out`. */
    const int32_t *mass_line;
    /* Lines between two KV heads: 1, each has its own, the row's line is the first of n_kv_heads;
     * 0: one for all, whose lists must be the same. */
    int mass_head_stride;
    /* [lines][capacity][4] f32, likewise beside `mass`: of each quarter of an entry. NULL: not
     * wanted. */
    float *quarter_mass;
    /* [n_seqs][n_heads][capacity] f32, zeroed by the caller: attention mass of each list entry by
     * query head, summed over the rows that have a line in the order of rows. What a scorer's
     * training is told (target/). */
    float *head_mass;
    /* [n_rows] u64: bit i of a row's mask says whether it sees the i-th row of its sequence's rows
     * in this pass (token trees). NULL: causal by position. */
    const uint64_t *ancestors;
    /* f64/u64 counter in backend memory: bytes of K and V that were read, added to. NULL: not
     * counted. */
    uint64_t *kv_bytes_read;
    /* The rows of `out`, packed as `pack` does, where its data is not NULL; what `out` holds
     * afterwards is then anything. */
    struct kern_act act;
};

/* ---- States of the select layer, and scores of blocks ---------------------------------------- */

enum {
    KERN_STATE_QUERIES = 32 /* newest states of a sequence that are kept as they are */
};

/* Where a sequence's memory of states lies (SparDA's representatives). At plane_offset inside the
 * page of each block (of the group that all rows read densely) stand rows of f32 [cols]: four, the
 * sums of the states of each quarter's tokens, added in the order of positions (a quarter's first
 * token sets its sum); behind them, those that are there in this order, all of the block:
 *   has_first   one: the state of its first token
 *   has_minmax  two: the least and the largest of its tokens' normed states, element by element
 *   has_spread  two: the mean of its tokens' normed states, and the sum of squares about it
 * A normed state is (x - mean) / sqrt(variance + 1e-5) over its columns. All of them go on token by
 * token (the spread by Welford's rule), so that chunks change no bit. */
struct kern_plane {
    void *base;          /* backend memory, as kern_kv's */
    size_t page_stride;  /* bytes */
    size_t plane_offset; /* bytes, KERN_ACT_ALIGN aligned */
    int cols;            /* H, the model's width */
    bool has_first, has_minmax, has_spread;
};
/* First of their two rows, and how many rows there are. */
static inline int kern_plane_minmax(const struct kern_plane *p) {
    return p->has_first ? 5 : 4;
}
static inline int kern_plane_spread(const struct kern_plane *p) {
    return kern_plane_minmax(p) + (p->has_minmax ? 2 : 0);
}
static inline int kern_plane_rows(const struct kern_plane *p) {
    return kern_plane_spread(p) + (p->has_spread ? 2 : 0);
}
static inline size_t kern_plane_bytes(const struct kern_plane *p) {
    return (size_t)kern_plane_rows(p) * (size_t)p->cols * sizeof(float);
}

/* Committed rows of one sequence in a pass, at most one note a sequence. Each position is noted
 * once, in order, after it was committed: nothing is ever taken back, so a rollback needs no
 * correction. */
struct kern_note {
    int32_t seq;       /* its list of pages; -1: nothing to note */
    int32_t first_row; /* of the states */
    int32_t position;  /* of that row */
    int32_t n_rows;
    int32_t ring; /* index of its ring */
};

enum kern_score {
    KERN_SCORE_MEAN, /* <q, r> / sqrt(cols) of the (normed) query and the block's mean */
    KERN_SCORE_LATE, /* logsumexp over queries, quarters and heads of <A q, B r> / sqrt(head_dim) */
    KERN_SCORE_MLP,  /* Linear(W, 1)(GELU(Linear(2 H, W)(LayerNorm(2 H)([q * r; q])))), erf GELU */
    /* As MEAN, r the corner that the query points to of a box around the block's normed states:
     * never less than what any of its tokens would score. */
    KERN_SCORE_MINMAX, /* r_i: the largest where q_i >= 0, else the least (Quest) */
    /* As MEAN, r_i = m_i + s_i where q_i >= 0, else m_i - s_i, of the normed states' mean and
     * standard deviation: never less than the mean of the tokens' own scores plus their standard
     * deviation, however the columns hang together. */
    KERN_SCORE_BOUND,
    KERN_N_SCORES
};
/* Others are <q, r> of a pooled query and what represents the block. */
static inline bool kern_score_has_weights(enum kern_score s) {
    return s == KERN_SCORE_LATE || s == KERN_SCORE_MLP;
}

/* A scorer of blocks; arrays f32 in backend memory. Sums in f32 (in double on the reference path),
 * in an order that `cols`, the weights' shapes and the block alone decide. Empty quarters count
 * nowhere; a partly filled one is the mean of what is there. */
struct kern_scorer {
    enum kern_score kind;
    int cols;
    int n_queries;   /* 1..KERN_STATE_QUERIES newest states ask (fewer where fewer are there). LATE:
                        each; others: their average by softmax(<q, q_i> / sqrt(cols)), q the newest,
                        after norming; 1 is the newest itself */
    bool normed;     /* queries and representatives are layer-normalised first: (x - mean) /
                        sqrt(variance + 1e-5), no weights. MINMAX and BOUND: true */
    bool by_first;   /* the block's first token represents it instead of its mean (MEAN, MLP) */
    bool by_quarter; /* MEAN, LATE: four numbers a block, each of a quarter alone; -infinity of one
                        that is empty. Not by_first */
    int n_heads, head_dim;            /* LATE */
    const float *a, *b;               /* LATE: [n_heads * head_dim][cols] each */
    int width;                        /* MLP: W */
    const float *ln_weight, *ln_bias; /* MLP: [2 cols], eps 1e-5; NULL both: no LayerNorm */
    const float *w1, *b1, *w2, *b2;   /* MLP: [W][2 cols], [W], [W], [1] */
};

/* A sequence as a scorer sees it. */
struct kern_score_view {
    struct kern_plane plane;
    const int32_t *page; /* [blocks] its page ids, backend memory */
    const float *ring;   /* its own: f32 [KERN_STATE_QUERIES][cols], row position % 32 */
    int n_tokens;        /* all noted */
};

/* ---- Rotary embedding and writing KV ------------------------------------------------------- */

struct kern_rope {
    const float *inv_freq; /* [dim / 2] f32, backend memory; NULL: no rotation (NoPE layer) */
    int dim;               /* leading elements of a head that turn, even */
    bool interleaved;      /* pairs (2i, 2i+1); else (i, i + dim/2) */
    float scale;           /* multiplies cos and sin (YaRN's attention factor) */
    const float *q_norm;   /* [head_dim] f32 or NULL: RMSNorm per head before the rotation */
    const float *k_norm;
    float norm_eps;
    const float *q_bias; /* [n_heads * head_dim] f32 or NULL */
    const float *k_bias, *v_bias;
};

/* ---- Sampling ------------------------------------------------------------------------------ */

enum {
    KERN_MAX_LOGPROBS = 20,
    KERN_MAX_BIAS = 64,
    KERN_MAX_DRAFT = 16, /* draft tokens of a round */
};

/* What a row's request asks for; one entry a row. Ranges are checked at the RPC edge. */
struct kern_sample {
    float temperature;        /* 0: greedy, lowest id wins ties */
    int32_t top_k;            /* 0: off */
    float top_p;              /* 1: off */
    float min_p;              /* 0: off */
    float repetition_penalty; /* 1: off; over prompt and output, as Hugging Face has it */
    float presence_penalty, frequency_penalty; /* 0: off; over output only, as OpenAI has it */
    uint64_t seed;
    int64_t position; /* of the token to be drawn: the RNG's counter */
    int32_t purpose;  /* enum rng_purpose of the draw: RNG_SAMPLE, RNG_DRAFT for a draft token */
    int32_t gumbel;   /* 1: the token is the argmax of log p + Gumbel noise that (seed, position,
                         id) alone decide, whatever `purpose` says: target and draft share it */
    int32_t history;  /* index of the sequence's history in kern_history, -1: no penalties */
    int32_t first_recent, n_recent; /* entries of kern_history.recent: output tokens that come
                             before this row and are not counted yet (draft tokens of the round) */
    int32_t probs_row;  /* `sample`: row of its `probs` that gets this row's filtered distribution,
                           -1: not wanted */
    int32_t n_logprobs; /* 0..KERN_MAX_LOGPROBS top entries wanted besides the drawn token's */
    int32_t want_logprob; /* 1: fill logprob */
    int32_t n_banned;     /* first entries of `banned`: ids that must not be drawn (min_tokens,
                             ignore_eos off) */
    int32_t banned[8];
};

/* Token counts of sequences for penalties. */
struct kern_history {
    const uint16_t *prompt; /* [n_histories][vocab] 1 where the id stands in the prompt */
    const uint16_t *output; /* [n_histories][vocab] occurrences in the output, saturating */
    size_t stride;          /* elements between histories: vocab */
    const int32_t *recent;  /* ids that kern_sample.first_recent points into; NULL: none */
};

/* The distributions that draft tokens were drawn from, as `sample` left them. */
struct kern_draft_probs {
    const float *probs; /* f32 [n_rows][stride], backend memory; each row sums to 1 */
    size_t stride;      /* >= n */
    int n;              /* columns: ids of the draft's head */
    const int32_t *ids; /* [n] ascending token ids of the columns; NULL: column = id. Elsewhere the
                           probability is zero */
};

/* One sequence's round: its pending token and n_draft draft tokens went through the target. */
struct kern_round {
    int32_t n_draft; /* 0..KERN_MAX_DRAFT */
    int32_t
        first_row; /* its n_draft + 1 rows of logits and params; row i follows draft token i - 1 */
    int32_t first_draft; /* entries of `draft`: its draft tokens */
    int32_t first_q;     /* its n_draft rows of draft probabilities. -1: a draft token is accepted
                            when it is the target's own draw at that place (greedy, Gumbel coupling,
                            proposals that nobody drew) */
};

struct kern_sampled {
    int32_t token; /* -1: the row's logits held NaN or nothing could be drawn */
    float logprob; /* of the token under the model's own distribution (before temperature and
                      filters, after nothing) */
    int32_t top_id[KERN_MAX_LOGPROBS];
    float top_logprob[KERN_MAX_LOGPROBS];
};

/* ---- From one draft pass to the next -------------------------------------------------------- */

/* A sequence whose draft tokens are being drawn, one a pass. */
struct kern_drawing {
    int32_t n_draft;      /* tokens wanted, 0: nothing is drawn for it */
    int32_t n_drawn;      /* of those, drawn so far */
    int32_t first_drawn;  /* entry of `drawn` that takes the first */
    int32_t first_target; /* entry of `target` that does */
    int32_t min_position; /* params' banned ids may be drawn from this position on */
    int32_t hole;         /* blocks before its end that its block list leaves out */
};

/* What `advance` writes for the pass after this one: row i of it is sequence i's only row. */
struct kern_next {
    int32_t *token, *position, *row_seq, *slot_page, *seq_row, *seq_n_rows, *logit_row; /* [n] */
    struct kern_sample *params; /* [n] of the draw */
    const int32_t *list;        /* [n][list_capacity] page ids of the sequences' block lists */
    int list_capacity;
};

/* ---- The table ----------------------------------------------------------------------------- */

struct kern_device_info {
    char name[128];      /* "CPU AVX-512 VNNI, AMX bf16; 2 threads", "NVIDIA H200" */
    size_t memory_bytes; /* total of the device */
    size_t free_bytes;   /* that this process may still take */
    size_t own_bytes;    /* that the backend took for itself when it was opened */
    bool is_host;        /* the device's memory is the host's */
    bool quarters;       /* attention reads quarters of blocks, and tells their mass */
    uint32_t kv_types;   /* bit t: attention reads caches of kern_dtype t */
    bool records;        /* record_begin keeps recordings: a few idle rows are cheaper than another
                            shape of pass */
};

enum {
    KERN_RECORD_KEY = 6, /* words of a recording's name */
    KERN_MAX_MARKS = 32, /* of device time */
};

struct kern_ops {
    const char *backend; /* "cpu", "cuda" */
    void (*close)(struct kern *k);
    void (*info)(const struct kern *k, struct kern_device_info *out);

    /* Memory. One block is reserved at start and carved by the caller; host and device pointers are
     * the same on the CPU. reserve zeroes. */
    int (*reserve)(struct kern *k, size_t bytes, void **out, struct err *e);
    void (*unreserve)(struct kern *k, void *p);
    /* Host memory that the device copies from and to at full speed (pinned on CUDA), zeroed,
     * KERN_ACT_ALIGN aligned. */
    int (*host_reserve)(struct kern *k, size_t bytes, void **out, struct err *e);
    void (*host_unreserve)(struct kern *k, void *p);
    /* Enqueued. A source inside host_reserve's memory must stay as it is until the next sync; any
     * other may change at once. */
    int (*upload)(struct kern *k, void *dst, const void *host, size_t bytes, struct err *e);
    /* Waits for everything before it. */
    int (*download)(struct kern *k, void *host, const void *src, size_t bytes, struct err *e);
    /* Enqueued: `host`, inside host_reserve's memory, holds the bytes after the next sync. */
    int (*fetch)(struct kern *k, void *host, const void *src, size_t bytes, struct err *e);
    int (*sync)(struct kern *k, struct err *e); /* wait; reports errors of what was enqueued */

    /* Launch graphs. record_begin: where operations were recorded under `key`, they are enqueued
     * again, *replayed is true, and the caller skips them and record_end. Otherwise the caller
     * enqueues them and calls record_end; whether that records is the backend's choice (the CPU
     * never does). The key must tell apart whatever the host hands to the operations: which
     * buffers, which counts. No upload, download or sync between the two. */
    int (*record_begin)(struct kern *k, const uint64_t key[KERN_RECORD_KEY], bool *replayed,
                        struct err *e);
    int (*record_end)(struct kern *k, struct err *e);

    /* Device time without waiting. mark: note, as mark i < KERN_MAX_MARKS, when everything enqueued
     * so far will be done; not between record_begin and record_end. elapsed: nanoseconds from one
     * mark to a later one, after a sync behind both; 0 where they tell nothing, because a recording
     * was made between the two. */
    int (*mark)(struct kern *k, int i);
    int (*elapsed)(struct kern *k, int from, int to, int64_t *ns);

    /* Weights. weight_bytes: size of the packed form (0: this backend has no such product).
     * weight_pack: from file layout (rows * cols weights) into `dst`, on all threads. */
    size_t (*weight_bytes)(const struct kern *k, enum kern_dtype t, int rows, int cols);
    int (*weight_pack)(struct kern *k, struct kern_weight *out, void *dst, enum kern_dtype t,
                       int rows, int cols, const void *src, struct err *e);

    /* x[r][:] = row token[r] of the packed matrix `w` as f32; ids outside [0, w->rows) give zeros.
     * x: f32 [n_rows][w->cols]. */
    int (*embed)(struct kern *k, const struct kern_weight *w, const int32_t *token, int n_rows,
                 float *x);

    /* Bytes of packed activations for these row counts. */
    size_t (*act_bytes)(const struct kern *k, struct kern_rows rows, int cols);

    /* x += delta where delta is not NULL; then RMSNorm(x) * weight (f32 [cols]), packed. x: f32
     * [n_rows][cols], in place. normed (f32 [n_rows][cols]) also gets the unpacked result where not
     * NULL. */
    int (*norm_pack)(struct kern *k, struct kern_rows rows, int cols, float *x, const float *delta,
                     const float *weight, float eps, struct kern_act act, float *normed);

    /* Pack f32 rows as they are. */
    int (*pack)(struct kern *k, struct kern_rows rows, int cols, const float *x,
                struct kern_act act);

    /* silu(gate) * up, packed: gate_up f32 [n_rows][2 * cols], gate first. */
    int (*gate_pack)(struct kern *k, struct kern_rows rows, int cols, const float *gate_up,
                     struct kern_act act);

    /* out[r][out_offset + i] = sum_j W[i][j] act[r][j]: f32 [n_rows][out_stride]. */
    int (*matmul)(struct kern *k, struct kern_rows rows, const struct kern_weight *w,
                  struct kern_act act, float *out, int out_stride, int out_offset);

    /* x_out[i] = x[row_idx[i]] for i < n (generated-class rows): picks the rows that need logits.
     */
    int (*gather)(struct kern *k, const float *x, int cols, const int32_t *row_idx, int n,
                  float *x_out);

    /* Bias, per-head norm and rotation of q and k in qkv (f32 [n_rows][(n_heads + 2 n_kv) *
     * head_dim], q then k then v), then k and v into their page slots: page slot_page[r], place
     * position % 64. */
    int (*rope_kv)(struct kern *k, const struct kern_batch *b, const struct kern_rope *rope,
                   int n_heads, float *qkv, const struct kern_kv *kv);

    /* Scratch bytes of attention for these capacities. */
    size_t (*attn_scratch_bytes)(const struct kern *k, struct kern_rows rows, int n_seqs,
                                 int n_heads, int head_dim, int list_capacity);

    /* out f32 [n_rows][n_heads * head_dim] = softmax(q K^T * scale) V over the lists; q inside qkv
     * as in rope_kv. Never touches an address of a page that is not in a row's list. */
    int (*attention)(struct kern *k, const struct kern_batch *b, const struct kern_lists *lists,
                     int n_heads, float scale, const float *qkv, const struct kern_kv *kv,
                     const struct kern_attn_taps *taps, void *scratch, float *out);

    /* Note states: rows of x (f32 [..][plane->cols], the state entering the select layer) into the
     * planes of their blocks and their sequences' rings. page: [..][capacity] ids by kern_note.seq;
     * ring: [..][KERN_STATE_QUERIES][cols]. notes, page, x and ring in backend memory. A position
     * beyond `capacity` blocks is passed over. */
    int (*note_states)(struct kern *k, int n, const struct kern_note *notes, const float *x,
                       const struct kern_plane *plane, const int32_t *page, int capacity,
                       float *ring);

    /* One number a block of one sequence (by_quarter: four), f32 out[blocks of v->n_tokens]. */
    size_t (*score_scratch_bytes)(const struct kern *k, const struct kern_scorer *s, int n_blocks);
    int (*score)(struct kern *k, const struct kern_scorer *s, const struct kern_score_view *v,
                 void *scratch, float *out);

    /* Copy block contents between pages (copy on write; one layer group). */
    int (*copy_page)(struct kern *k, void *dst, const void *src, size_t bytes);

    size_t (*sample_scratch_bytes)(const struct kern *k, int n_rows, int vocab);
    /* Draw one token a row from logits f32 [n_rows][stride] (first `vocab` entries; kept
     * unchanged): penalties, temperature, top-k, top-p, min-p in this order, then inverse-CDF by
     * params' purpose, or by Gumbel noise. params, history and out in backend memory. Where ids is
     * not NULL, column i is token ids[i] (ascending): penalties, bans and the token drawn go by it
     * (a draft's reduced head). Where probs is not NULL, its row params[r].probs_row gets the
     * filtered distribution by columns, f32 [..][vocab]; rows whose probs_row is -1 write none. */
    int (*sample)(struct kern *k, int n_rows, int vocab, const int32_t *ids, const float *logits,
                  size_t stride, const struct kern_sample *params,
                  const struct kern_history *history, void *scratch, struct kern_sampled *out,
                  float *probs);

    size_t (*accept_scratch_bytes)(const struct kern *k, int n_rounds, int vocab);
    /* Decide rounds. With p the target's distribution of a row after params' filters (as `sample`
     * has it) and q the draft's: draft token x is accepted when u q(x) < p(x), u uniform by
     * RNG_ACCEPT; at the first that is not, the token is drawn from max(0, p - q), normalised, by
     * RNG_RESIDUAL; after the last, a bonus token from p by the row's own purpose. Without q
     * (first_q -1): accepted while it equals the row's own draw, which is the token at the first
     * that differs. So a round of no draft token is `sample`. Writes n_accepted [n_rounds] and
     * out[first_row .. first_row + n_accepted], the tokens that follow in order with their
     * logprobs; other rows of out are left alone. A row that holds NaN, or has nothing to draw,
     * ends its round with token -1; a draft token that is no id (-1) is never accepted. Leviathan
     * et al. 2023, algorithm 1. All in backend memory. */
    int (*accept)(struct kern *k, int n_rounds, int vocab, const float *logits, size_t stride,
                  const struct kern_sample *params, const struct kern_history *history,
                  const struct kern_round *rounds, const int32_t *draft,
                  const struct kern_draft_probs *q, void *scratch, int32_t *n_accepted,
                  struct kern_sampled *out);

    /* After a draft pass's `sample`: take sequence i's token out[i] for i < n and make the next
     * pass's input of it. The token goes to drawn[first_drawn + n_drawn] and target[first_target +
     * n_drawn], n_drawn grows. Row i gets the token at the position that params[i] drew for, its
     * slot from the block list; params move on by one position, one recent token, one probs_row.
     * Where all wanted are drawn, none were wanted or the token is -1, row i is idle, sequence i
     * has no rows and its draws write no probabilities; behind a token of -1 further ones are -1.
     */
    int (*advance)(struct kern *k, int n, struct kern_drawing *drawing,
                   const struct kern_sampled *out, const struct kern_next *next, int32_t *drawn,
                   int32_t *target);

    /* After `accept`: count the tokens that rounds emitted in kern_history's `output` (stride
     * elements a history), saturating, where params of a round's first row name a history. */
    int (*tally)(struct kern *k, int n_rounds, const struct kern_round *rounds,
                 const struct kern_sample *params, const int32_t *n_accepted,
                 const struct kern_sampled *out, uint16_t *output, size_t stride);
};

struct kern {
    const struct kern_ops *ops; /* first member of every backend's context */
};

/* ---- Opening a backend --------------------------------------------------------------------- */

struct kern_options {
    int n_threads;  /* 0: all usable (CPU) */
    int device;     /* ordinal among the visible ones (CUDA) */
    bool plan_only; /* CUDA: no device is needed; only sizes may be asked for, and `info` */
    enum kern_precision precision; /* CUDA has FAST only */
    const char *isa; /* NULL or "auto", "amx", "avx512", "avxvnni", "avx2", "plain": kernels;
                        one that the machine lacks is refused */
};

int kern_cpu_open(struct kern **out, const struct kern_options *o, struct err *e);
/* E_UNSUPPORTED with what is missing in a build or on a machine without CUDA, E_RANGE for a device
 * number that is not there, E_NOMEM where it has no room for the backend's own memory. */
int kern_cuda_open(struct kern **out, const struct kern_options *o, struct err *e);

/* The other way round of a backend's page order, for tests and tiers: f32 [64][head_dim] of one
 * head. 8-bit keys come as they are kept, turned (kernels/cpu/attention_q8.h). */
void kern_cpu_read_kv(const struct kern_kv *kv, int page, int head, bool value, float *out);
/* The same of the CUDA backend's order; page_plane: the head's 64 x head_dim elements, on the host.
 */
void kern_cuda_read_kv(const void *page_plane, enum kern_dtype t, int head_dim, float *out);

#ifdef __cplusplus
}
#endif
#endif
