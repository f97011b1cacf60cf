/* The law of rounds: chains over a toy pair of 8 tokens, whose target and draft look two tokens
 * back; the first three tokens of a chain are counted and held to the exact joint law of the target
 * alone by chi-square, at a false-alarm rate of 1e-6 a case with fixed seeds (so the outcome never
 * changes from run to run). The same harness must refuse deciders that are wrong on purpose. */
#include "tests/harness.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/rng.h"
#include "kernels/cpu/cpu.h"
#include "tests/sample_twin.h"

static struct kern *open_kern(const char *isa, int n_threads) {
    struct kern *k;
    struct kern_options o = {.n_threads = n_threads, .isa = isa};
    return kern_cpu_open(&k, &o, NULL) == 0 ? k : NULL;
}

enum {
    V = 8,
    N_HEAD = 5,
    N_CONTEXTS = 1 + V + V * V, /* of at most two tokens */
    N_JOINT = V * V * V,
    CHAINS = 256, /* that advance together */
    LENGTH = 3,   /* tokens of a chain that count */
    DEPTH = 3,    /* draft tokens at most */
};

static const int32_t head_ids[N_HEAD] = {0, 1, 3, 4, 6};
static const uint16_t toy_prompt[V] = {0, 1, 0, 0, 0, 1, 0, 0};

struct toy {
    float target[N_CONTEXTS][V], draft[N_CONTEXTS][V], head[N_CONTEXTS][N_HEAD];
};

static int context(const int32_t *tokens, int n) {
    if (n == 0) return 0;
    if (n == 1) return 1 + tokens[0];
    return 1 + V + V * tokens[n - 2] + tokens[n - 1];
}

/* The draft is the target and noise of its own. */
static void toy_make(struct toy *t) {
    twin_logits(&t->target[0][0], N_CONTEXTS * V, 41, 1.2f);
    twin_logits(&t->draft[0][0], N_CONTEXTS * V, 42, 0.8f);
    for (int c = 0; c < N_CONTEXTS; c++) {
        for (int i = 0; i < V; i++) t->draft[c][i] += t->target[c][i];
        for (int i = 0; i < N_HEAD; i++) t->head[c][i] = t->draft[c][head_ids[i]];
    }
}

enum proposer { NOBODY, MODEL, HEAD, LOOKUP, GUMBEL };
static const char *const proposer_names[] = {"nobody", "model", "head", "lookup", "gumbel"};

struct law_case {
    struct kern_sample params; /* history 0: with penalties */
    enum proposer proposer;
    int depth;
    enum twin_fault fault;
    bool op;            /* decided by the operation, else by the twin with `fault` */
    bool forgets_draft; /* the target's rows do not see the draft tokens before them */
};

/* The chains that advance together. */
struct chains {
    struct kern *k;
    const struct toy *toy;
    struct law_case c;
    uint64_t seed;
    int n_active, active[CHAINS];
    int32_t token[CHAINS][LENGTH + DEPTH + 1], recent[CHAINS * DEPTH];
    int n_tokens[CHAINS];
    uint16_t prompt[CHAINS * V], output[CHAINS * V];
    struct kern_history history;
    /* A round. */
    struct kern_sample params[CHAINS * (DEPTH + 1)];
    float logits[CHAINS * (DEPTH + 1) * V], probs[CHAINS * DEPTH * V];
    struct kern_round rounds[CHAINS];
    struct kern_sampled out[CHAINS * (DEPTH + 1)];
    int32_t n_accepted[CHAINS];
    long n_rounds, n_drafted, n_kept;
    _Alignas(64) uint8_t scratch[1 << 17];
};

static struct kern_sample row_params(const struct chains *s, int slot, int n_recent, int purpose) {
    struct kern_sample p = s->c.params;
    p.seed = s->seed + (uint64_t)slot;
    p.position = s->n_tokens[slot] + n_recent;
    p.purpose = purpose;
    p.gumbel = s->c.proposer == GUMBEL;
    if (p.history >= 0) p.history = slot;
    p.first_recent = slot * DEPTH;
    p.n_recent = n_recent;
    return p;
}

/* Context of a chain behind its tokens and n draft tokens. */
static int draft_context(const struct chains *s, int slot, int n) {
    int32_t t[LENGTH + 2 * DEPTH + 1];
    memcpy(t, s->token[slot], (size_t)s->n_tokens[slot] * sizeof *t);
    memcpy(t + s->n_tokens[slot], s->recent + slot * DEPTH, (size_t)n * sizeof *t);
    return context(t, s->n_tokens[slot] + n);
}

/* Draft token i of every active chain, with its distribution where a model draws it. */
static void propose(struct chains *s, int i) {
    bool head = s->c.proposer == HEAD;
    int cols = head ? N_HEAD : V;
    for (int a = 0; a < s->n_active; a++) {
        int slot = s->active[a], ctx = draft_context(s, slot, i);
        if (s->c.proposer == LOOKUP) {
            s->recent[slot * DEPTH + i] = (int32_t)(rng_u32(77, (uint64_t)ctx, RNG_TEST, 0) % V);
            continue;
        }
        memcpy(s->logits + a * cols, head ? s->toy->head[ctx] : s->toy->draft[ctx],
               (size_t)cols * sizeof(float));
        s->params[a] = row_params(s, slot, i, RNG_DRAFT);
        s->params[a].probs_row = a * DEPTH + i;
    }
    if (s->c.proposer == LOOKUP) return;
    s->k->ops->sample(s->k, s->n_active, cols, head ? head_ids : NULL, s->logits, (size_t)cols,
                      s->params, &s->history, s->scratch, s->out, s->probs);
    for (int a = 0; a < s->n_active; a++) {
        assert_in_range(s->out[a].token, 0, V - 1);
        s->recent[s->active[a] * DEPTH + i] = s->out[a].token;
    }
}

static void decide(struct chains *s, const struct kern_draft_probs *q) {
    if (s->c.op) {
        s->k->ops->accept(s->k, s->n_active, V, s->logits, V, s->params, &s->history, s->rounds,
                          s->recent, q, s->scratch, s->n_accepted, s->out);
        return;
    }
    for (int a = 0; a < s->n_active; a++) {
        struct twin_round t = twin_accept(V, s->logits, V, s->params, &s->history, &s->rounds[a],
                                          s->recent, q, s->c.fault);
        s->n_accepted[a] = t.n_accepted;
        for (int i = 0; i <= t.n_accepted; i++)
            s->out[s->rounds[a].first_row + i].token = t.token[i];
    }
}

/* One round of every active chain; those that are long enough leave. */
static void advance(struct chains *s) {
    bool drawn = s->c.proposer == MODEL || s->c.proposer == HEAD;
    int depth = s->c.depth, n_left = 0;
    for (int i = 0; i < depth; i++) propose(s, i);
    for (int a = 0; a < s->n_active; a++) {
        int slot = s->active[a], first = a * (depth + 1);
        s->rounds[a] = (struct kern_round){depth, first, slot * DEPTH, drawn ? a * DEPTH : -1};
        for (int i = 0; i <= depth; i++) {
            memcpy(s->logits + (first + i) * V, s->toy->target[draft_context(s, slot, i)],
                   V * sizeof(float));
            s->params[first + i] = row_params(s, slot, i, RNG_SAMPLE);
            if (s->c.forgets_draft) s->params[first + i].n_recent = 0;
        }
    }
    bool head = s->c.proposer == HEAD;
    struct kern_draft_probs q = {s->probs, (size_t)(head ? N_HEAD : V), head ? N_HEAD : V,
                                 head ? head_ids : NULL};
    decide(s, &q);
    for (int a = 0; a < s->n_active; a++) {
        int slot = s->active[a];
        assert_in_range(s->n_accepted[a], 0, depth);
        for (int i = 0; i <= s->n_accepted[a]; i++) {
            int32_t token = s->out[a * (depth + 1) + i].token;
            assert_in_range(token, 0, V - 1);
            s->token[slot][s->n_tokens[slot]++] = token;
            s->output[slot * V + token]++;
        }
        s->n_kept += s->n_accepted[a];
        if (s->n_tokens[slot] < LENGTH) s->active[n_left++] = slot;
    }
    s->n_drafted += (long)depth * s->n_active;
    s->n_rounds += s->n_active;
    s->n_active = n_left;
}

/* Chains of at least n_rounds rounds; counts[a V^2 + b V + c] of their first tokens, added to.
 * Returns how many chains. */
static int simulate(struct chains *s, long n_rounds, uint64_t seed, int *counts) {
    int n = 0;
    s->history = (struct kern_history){s->prompt, s->output, V, s->recent};
    for (int i = 0; i < CHAINS; i++) memcpy(s->prompt + i * V, toy_prompt, sizeof toy_prompt);
    s->n_rounds = s->n_drafted = s->n_kept = 0;
    for (s->seed = seed; s->n_rounds < n_rounds; s->seed += CHAINS) {
        memset(s->output, 0, sizeof s->output);
        memset(s->n_tokens, 0, sizeof s->n_tokens);
        s->n_active = CHAINS;
        for (int i = 0; i < CHAINS; i++) s->active[i] = i;
        while (s->n_active > 0) advance(s);
        for (int i = 0; i < CHAINS; i++)
            counts[(s->token[i][0] * V + s->token[i][1]) * V + s->token[i][2]]++;
        n += CHAINS;
    }
    return n;
}

/* The exact law of the target alone. */
static void joint_law(const struct toy *toy, const struct kern_sample *params, double *want) {
    uint16_t output[V] = {0};
    struct kern_history h = {toy_prompt, output, V, NULL};
    double pa[V], pb[V], pc[V];
    assert_true(twin_probs(toy->target[0], V, NULL, params, &h, pa));
    for (int32_t a = 0; a < V; a++) {
        output[a]++;
        assert_true(twin_probs(toy->target[context(&a, 1)], V, NULL, params, &h, pb));
        for (int32_t b = 0; b < V; b++) {
            output[b]++;
            assert_true(
                twin_probs(toy->target[context((int32_t[]){a, b}, 2)], V, NULL, params, &h, pc));
            for (int c = 0; c < V; c++) want[(a * V + b) * V + c] = pa[a] * pb[b] * pc[c];
            output[b]--;
        }
        output[a]--;
    }
}

enum { N_FILTERS = 32 };

static struct kern_sample filters(int bits) {
    struct kern_sample p = twin_neutral();
    p.temperature = bits & 1 ? 0.7f : 1;
    if (bits & 2) p.top_k = 5;
    if (bits & 4) p.top_p = 0.85f;
    if (bits & 8) p.min_p = 0.06f;
    if (bits & 16) {
        p.history = 0;
        p.repetition_penalty = 1.3f;
        p.presence_penalty = 0.4f;
        p.frequency_penalty = 0.2f;
    }
    return p;
}

static const struct {
    enum proposer proposer;
    int depth;
} kinds[] = {{NOBODY, 0}, {MODEL, 1},  {MODEL, 2},  {MODEL, 3},  {HEAD, 1},  {HEAD, 2},
             {HEAD, 3},   {LOOKUP, 1}, {LOOKUP, 2}, {LOOKUP, 3}, {GUMBEL, 3}};
enum { N_KINDS = sizeof kinds / sizeof *kinds };

/* Filter combinations begin, begin + step .. below end over n_rounds rounds each, shared among the
 * kinds of proposal; each kind is judged alone, and all together. */
static void check_law(int begin, int end, int step, long n_rounds) {
    static struct toy toy;
    static struct chains s;
    toy_make(&toy);
    s.k = open_kern(NULL, 1);
    assert_non_null(s.k);
    s.toy = &toy;
    for (int f = begin; f < end; f += step) {
        double want[N_JOINT];
        int all[N_JOINT] = {0}, n_all = 0;
        s.c = (struct law_case){.params = filters(f), .op = true};
        joint_law(&toy, &s.c.params, want);
        for (int i = 0; i < N_KINDS; i++) {
            int counts[N_JOINT] = {0};
            s.c.proposer = kinds[i].proposer;
            s.c.depth = kinds[i].depth;
            int n = simulate(&s, n_rounds / N_KINDS + 1, (uint64_t)(f * N_KINDS + i) << 32, counts);
            double excess = twin_chi_excess(counts, want, N_JOINT, n);
            if (!(excess < 1))
                fail_msg("filters %d, %s of %d: chi-square %g of its limit", f,
                         proposer_names[kinds[i].proposer], kinds[i].depth, excess);
            if (kinds[i].depth && !(s.n_kept > s.n_drafted / 100 && s.n_kept < s.n_drafted))
                fail_msg("filters %d, %s of %d: %ld of %ld accepted", f,
                         proposer_names[kinds[i].proposer], kinds[i].depth, s.n_kept, s.n_drafted);
            for (int j = 0; j < N_JOINT; j++) all[j] += counts[j];
            n_all += n;
        }
        double excess = twin_chi_excess(all, want, N_JOINT, n_all);
        if (!(excess < 1)) fail_msg("filters %d: chi-square %g of its limit", f, excess);
    }
    s.k->ops->close(s.k);
}

static void test_accept_law(void) {
    check_law(0, N_FILTERS, 1, TEST_SANITIZED ? 10000 : 100000);
}

/* Each filter on and off. */
static void test_accept_law_million(void) {
    check_law(0, N_FILTERS, 7, 1000000);
}

static void test_accept_law_million_plain(void) {
    check_law(0, N_FILTERS / 2, 1, 1000000);
}

static void test_accept_law_million_penalties(void) {
    check_law(N_FILTERS / 2, N_FILTERS, 1, 1000000);
}

/* The harness sees what is wrong, and the twin that it sees it in is right without the fault. */
static void test_accept_law_can_fail(void) {
    static struct toy toy;
    static struct chains s;
    toy_make(&toy);
    s.k = open_kern(NULL, 1);
    s.toy = &toy;
    for (int f = 0; f < N_FILTERS; f += 21) /* none; top-p and penalties at 0.7 */
        for (int fault = 0; fault <= TWIN_N_FAULTS; fault++) {
            double want[N_JOINT];
            int counts[N_JOINT] = {0};
            s.c = (struct law_case){.params = filters(f),
                                    .proposer = MODEL,
                                    .depth = 2,
                                    .fault = (enum twin_fault)fault};
            joint_law(&toy, &s.c.params, want);
            if (fault == TWIN_N_FAULTS) { /* the right decider, told of too few tokens */
                if (s.c.params.history < 0) continue;
                s.c.op = s.c.forgets_draft = true;
            }
            int n = simulate(&s, 50000, (uint64_t)(f * 10 + fault) << 32, counts);
            double excess = twin_chi_excess(counts, want, N_JOINT, n);
            if (fault == TWIN_RIGHT ? excess >= 1 : excess < 1.3)
                fail_msg("filters %d, fault %d: chi-square %g of its limit", f, fault, excess);
        }
    s.k->ops->close(s.k);
}

const struct test tests[] = {
    {"accept_law", TEST_QUICK, 120000, test_accept_law},
    /* Full: of the twin's numbers alone, which need so many rounds; accept is accept_law's. */
    {"accept_law_can_fail", TEST_FULL, 120000, test_accept_law_can_fail},
    {"accept_law_million", TEST_FULL, 240000, test_accept_law_million},
    {"accept_law_million_plain", TEST_LONG, 600000, test_accept_law_million_plain},
    {"accept_law_million_penalties", TEST_LONG, 600000, test_accept_law_million_penalties},
    {0},
};
