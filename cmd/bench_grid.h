#ifndef TANDEM_CMD_BENCH_GRID_H
#define TANDEM_CMD_BENCH_GRID_H

/* `tandem bench --grid`: {speculation off, on} x {dense, sparse} over prompt lengths and batch
 * sizes, on one set of prompts in one process. bench_grid.c measures, bench_grid_text.c prints a
 * table or JSON, bench_grid_html.c a page. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/strbuf.h"
#include "engine/engine.h"

enum { GRID_MAX_LIST = 16, GRID_MAX_REPEATS = 101, GRID_MAX_PROMPTS = ENGINE_MAX_SEQS };

/* When prompts are computed whole rather than taken from the prefix cache. */
enum grid_prefill {
    GRID_PREFILL_CELL, /* by every cell, in its first turn */
    GRID_PREFILL_TURN, /* by every cell in every turn */
    GRID_PREFILL_ONCE, /* by the first cell in its first turn: quick, no time to first token of
                          others */
};

struct bench_grid_options {
    int depths[GRID_MAX_LIST], n_depths; /* prompt lengths, tokens */
    int batches[GRID_MAX_LIST], n_batches;
    int n_tokens, n_repeats; /* most tokens of an answer; turns of each cell */
    double temperature;
    enum grid_prefill prefill;
    const char *kind;      /* only this question; NULL: all */
    const char *text;      /* as bench_text has it */
    const char *html_path; /* NULL: no page */
    bool json;
    struct target_settings sparse; /* of the sparse cells */
};

/* A cell's number: bit 0 is speculation, bit 1 sparse reading. */
enum grid_cell_name { GRID_PLAIN, GRID_SPEC, GRID_SPARSE, GRID_BOTH, GRID_CELLS };
static inline bool grid_speculates(int cell) {
    return cell & 1;
}
static inline bool grid_reads_sparsely(int cell) {
    return cell & 2;
}

/* Medians are over turns; sums over all prompts and all turns but the first (with
 * GRID_PREFILL_TURN: all turns). */
struct grid_cell {
    double ttft_ms, ttft_worst_ms;    /* of prompts computed whole: median, largest; 0: none was */
    double first_tpot_ms;             /* time per token of the first turn */
    double tpot_ms;                   /* ms a token of one sequence, without its first */
    double itl_p50_ms, itl_p99_ms;    /* between two commits of a sequence */
    double tokens_per_s;              /* of all sequences at once */
    double gain, gain_low, gain_high; /* time per token of GRID_PLAIN over this one's, by turn */
    int n_tokens;                     /* of all answers of a turn */
    uint64_t n_rounds, n_plain_rounds, n_drafted, n_accepted;
    struct engine_answer_kv kv; /* the kernels' counters beside the lists */
    /* What requests are told: K and V of listed positions, and had the lists held everything. */
    uint64_t shallow_bytes, deep_bytes, dense_bytes;
    double select_share;   /* of decoding's time, spent in selections */
    int n_blocks, n_kept;  /* of the prompt read last; equal: nothing was left out */
    int n_left_out;        /* prompts of which something was, in a turn */
    size_t kv_held;        /* bytes of the pages in use while all sequences ran */
    size_t resident_bytes; /* of the process, afterwards */
    bool same_text;        /* of each turn as without speculation, token for token */
    double like_dense;     /* share of an answer's tokens before it differs from the dense one */
};

struct grid_kind {
    const char *name;
    int n_prompts;
    double gain[GRID_CELLS]; /* medians of the turns */
};

struct grid_point {
    int depth, batch, n_prompts;
    int n_prompt_tokens; /* of the longest prompt made */
    struct grid_cell cell[GRID_CELLS];
    double product, share; /* of the gains alone; the measured combination's part of it */
    bool same_text;        /* in every cell */
    bool ran_sparse;   /* each prompt of each sparse cell lost blocks, and the kernels read less */
    bool bytes_agree;  /* kernels' counters are the lists' bytes, in every cell */
    bool repeats_text; /* the text was shorter than a prompt */
    struct grid_kind kind[8];
    int n_kinds;
};

int bench_grid(struct engine *g, const struct bench_grid_options *o, struct err *e);

/* ---- What the files share ---- */

const char *bench__grid_cell_name(int cell); /* "off / dense" */
extern const char bench__grid_dummy[];       /* what random weights cannot tell */
const char *bench__grid_prefill(const struct bench_grid_options *o); /* in words */
void bench__grid_head(const struct engine *g, const struct bench_grid_options *o);
void bench__grid_point(const struct grid_point *p, const struct bench_grid_options *o);
void bench__grid_json(struct strbuf *b, const struct engine *g, const struct bench_grid_options *o,
                      const struct grid_point *p, int n);
void bench__grid_html(struct strbuf *b, const struct engine *g, const struct bench_grid_options *o,
                      const struct grid_point *p, int n);
/* "observed, 32 blocks" of the sparse cells' settings. */
void bench__grid_settings(struct strbuf *b, const struct engine *g,
                          const struct bench_grid_options *o);

#endif
