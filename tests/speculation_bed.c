#include "tests/speculation_bed.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <xxhash.h>

#include "base/err.h"
#include "base/rng.h"
#include "model/tokenizer.h"

enum { FIRST_SEED = 1000 };

const int bed_all_lengths[BED_N_LENGTHS] = {1, 2, 3, 4, 5, 6, 7, 8, VERIFY_DRAFT_AUTO};

/* ---- Requests ---- */

/* Settings that touch every branch: penalties, stops, log-probabilities, min_tokens, ends at the
 * context's end. */
static void vary(const struct bed *b, int i, struct bed_record *r,
                 struct engine_submit_options *s) {
    tiny_submit_options(s, r->prompt, r->n_prompt);
    s->params.seed = FIRST_SEED + (uint64_t)i;
    s->params.max_tokens = i % 5 == 4 ? b->n_out / 3 + i % 11 : b->n_out;
    s->params.ignore_eos = i % 6 == 3;
    if (i % 4 == 1) s->params.repetition_penalty = 1.2;
    if (i % 4 == 2) s->params.frequency_penalty = 0.3, s->params.presence_penalty = 0.2;
    if (i % 3 == 1) s->params.logprobs = 3;
    if (i % 7 == 5) s->params.min_tokens = 8;
    if (i % 8 == 6) {
        s->params.n_stops = 2;
        s->params.stops[0] = (struct verify_stop){.n = 2, .text = "\n\n"};
        s->params.stops[1] = (struct verify_stop){.n = 3, .text = "the"};
    }
    if (!b->gumbel && !b->sampled) return;
    if (b->gumbel) s->params.coupling = VERIFY_GUMBEL;
    s->params.temperature = i % 2 ? 1 : 0.7;
    if (i % 3 == 0) s->params.top_k = 30;
    if (i % 5 == 1) s->params.top_p = 0.9;
    if (i % 5 == 2) s->params.min_p = 0.05;
}

static void make_tiny(const struct bed *b, int i, struct bed_record *r,
                      struct engine_submit_options *s) {
    static const int lengths[] = {1, 20, 60, 63, 64, 65, 120, 127, 128, 190, 250};
    r->n_prompt = lengths[i % 11];
    tiny_prompt(77 + (uint64_t)i, r->prompt, r->n_prompt);
    /* A third repeats itself, so that lookup has something to find. */
    for (int k = 12; i % 3 == 0 && k < r->n_prompt; k++) r->prompt[k] = r->prompt[k % 12];
    vary(b, i, r, s);
}

/* Prompts of 5 to 7 blocks. */
static void make_tiny_long(const struct bed *b, int i, struct bed_record *r,
                           struct engine_submit_options *s) {
    r->n_prompt = 270 + i * 41 % 130;
    tiny_prompt(77 + (uint64_t)i, r->prompt, r->n_prompt);
    for (int k = 12; i % 3 == 0 && k < r->n_prompt; k++) r->prompt[k] = r->prompt[k % 12];
    vary(b, i, r, s);
    if ((b->gumbel || b->sampled) && i % 3 == 0)
        s->params.temperature = 0.2; /* it goes on repeating */
}

/* ---- Recording ---- */

static struct bed_record *of_request(struct bed *b, const struct engine_request *request) {
    struct engine_progress p;
    engine_poll(request, &p);
    if (p.seed < FIRST_SEED || p.seed >= FIRST_SEED + (uint64_t)b->n_requests) return NULL;
    return &b->got[p.seed - FIRST_SEED];
}

static void keep_row(void *arg, const struct engine_request *request, int position,
                     const float *logits, int n) {
    struct bed_record *r = of_request(arg, request);
    if (!r) return; /* company */
    assert_in_range(position, r->n_prompt - 1, BED_N_ROWS - 1);
    r->row[position] = XXH3_64bits(logits, (size_t)n * sizeof *logits);
}

/* The page `page` on the host: in its place, or a copy of `bytes` bytes from a device. */
static const uint8_t *page_of(struct bed *b, const struct engine_kv_view *v, int page,
                              size_t bytes) {
    struct err e = {0};
    uint8_t *at = (uint8_t *)v->arena + kvpool_page_offset(page);
    if (!strcmp(v->kern->ops->backend, "cpu")) return at;
    b->page = realloc(b->page, bytes);
    assert_non_null(b->page);
    assert_ok(v->kern->ops->download(v->kern, b->page, at, bytes, &e), e);
    return b->page;
}

/* K and V of the first n tokens of a page. */
static void hash_page(const struct bed *b, const struct engine_kv_view *v, const uint8_t *page,
                      int n_layers, int n, XXH3_state_t *state) {
    static float values[KERN_BLOCK * KERN_MAX_HEAD_DIM];
    bool cpu = !strcmp(v->kern->ops->backend, "cpu");
    size_t head = KERN_BLOCK * kern_kv_token_bytes(v->dtype, b->head_dim);
    size_t plane = head * (size_t)b->n_kv_heads;
    for (int layer = 0; layer < n_layers; layer++) {
        struct kern_kv kv = {.base = (void *)(uintptr_t)page,
                             .page_stride = KVPOOL_ALIGN,
                             .k_offset = 2 * (size_t)layer * plane,
                             .v_offset = (2 * (size_t)layer + 1) * plane,
                             .head_stride = head,
                             .dtype = v->dtype,
                             .n_kv_heads = b->n_kv_heads,
                             .head_dim = b->head_dim};
        for (int which = 0; which < 2 * b->n_kv_heads; which++) {
            size_t at = (which % 2 ? kv.v_offset : kv.k_offset) + (size_t)(which / 2) * head;
            if (cpu) kern_cpu_read_kv(&kv, 0, which / 2, which % 2, values);
            else kern_cuda_read_kv(page + at, v->dtype, b->head_dim, values);
            XXH3_64bits_update(state, values, (size_t)n * (size_t)b->head_dim * sizeof *values);
        }
    }
}

static void keep_kv(void *arg, const struct engine_request *request,
                    const struct engine_kv_view *v) {
    struct bed *b = arg;
    struct bed_record *r = of_request(b, request);
    if (!r) return;
    XXH3_state_t *state = XXH3_createState();
    XXH3_64bits_reset(state);
    size_t layer =
        2 * (size_t)b->n_kv_heads * KERN_BLOCK * kern_kv_token_bytes(v->dtype, b->head_dim);
    for (int g = 0; g < v->n_groups; g++)
        for (int at = 0; at < v->n_kv && v->group[g].n_layers > 0; at += KERN_BLOCK) {
            int n_layers = v->group[g].n_layers, n = v->n_kv - at;
            const uint8_t *page =
                page_of(b, v, v->group[g].pages[at / KERN_BLOCK], (size_t)n_layers * layer);
            hash_page(b, v, page, n_layers, n < KERN_BLOCK ? n : KERN_BLOCK, state);
        }
    r->kv = XXH3_64bits_digest(state);
    r->n_kv = v->n_kv;
    XXH3_freeState(state);
}

static void keep_result(struct bed_record *r, const struct engine_progress *p) {
    if (p->finish == ENGINE_FAILED) fail_msg("seed %d: %s", (int)p->seed, p->error);
    r->n_out = p->n_tokens;
    r->finish = p->finish;
    r->speculation = p->speculation;
    memcpy(r->out, p->tokens, (size_t)p->n_tokens * sizeof *r->out);
    for (int i = 0; i < p->n_tokens && p->logprobs; i++) r->logprob[i] = p->logprobs[i].logprob;
    uint64_t n = 0;
    for (int i = 0; i < p->n_tokens; i++) n += p->drafted[i];
    assert_int_equal(n, p->sparsity.settings.exact ? p->sparsity.exact.n_accepted
                                                   : p->speculation.n_accepted);
}

static struct engine *open_bed(struct bed *b, const struct engine_options *o) {
    struct engine *g;
    struct err e = {0};
    struct engine_options options = *o;
    options.model_path = b->target;
    assert_ok(engine_open(&g, &options, NULL, NULL, &e), e);
    const struct model_config *c = engine_model_config(g);
    b->n_layers = c->n_layers;
    b->n_kv_heads = c->n_kv_heads;
    b->head_dim = c->head_dim;
    engine_trace_logits(g, keep_row, b);
    engine_trace_kv(g, keep_kv, b);
    return g;
}

/* ---- Runs ---- */

/* A line for every 50 answers of a long bed: a run of its takes minutes. */
static void show_progress(const struct bed *b, const struct engine_options *o, const char *how,
                          int n) {
    if (b->n_requests < 50 || n % 50 != 0) return;
    printf("# draft tokens %d, %s: %d of %d answers\n", o->draft_tokens, how, n, b->n_requests);
    fflush(stdout);
}

/* Requests first, first + step, .. below end. */
struct some {
    int first, step, end;
};

static void run_alone(struct bed *b, const struct engine_options *o, struct some of,
                      struct engine_stats *stats) {
    struct engine *g = open_bed(b, o);
    for (int i = of.first; i < of.end; i += of.step) {
        struct engine_submit_options s;
        b->make(b, i, &b->got[i], &s);
        struct engine_request *r = tiny_submit(g, &s);
        struct engine_progress p = tiny_wait(r);
        keep_result(&b->got[i], &p);
        engine_release(g, r);
        show_progress(b, o, "one by one", i + 1);
    }
    tiny_assert_pool_whole(g);
    engine_get_stats(g, stats);
    engine_close(g);
}

/* Batches of up to 16 in random order, every third with a neighbour that is cancelled. */
static void run_together(struct bed *b, const struct engine_options *o, uint64_t seed,
                         struct engine_stats *stats) {
    struct engine *g = open_bed(b, o);
    struct engine_request *r[BED_MAX_REQUESTS], *other[BED_MAX_REQUESTS] = {0};
    int order[BED_MAX_REQUESTS];
    for (int i = 0; i < b->n_requests; i++) {
        int at = (int)(rng_u32(seed, (uint64_t)i, RNG_TEST, 0) % (uint32_t)(i + 1));
        order[i] = order[at];
        order[at] = i;
    }
    for (int k = 0; k < b->n_requests; k++) {
        int i = order[k];
        struct engine_submit_options s;
        static struct bed_record neighbour;
        b->make(b, i, &b->got[i], &s);
        /* Drafts of different lengths in one pass. */
        if (o->draft_tokens > 1) s.params.draft_tokens = 1 + i % o->draft_tokens;
        r[i] = tiny_submit(g, &s);
        if (k % 3 != 0) continue;
        b->make(b, (i + 5) % b->n_requests, &neighbour, &s);
        s.params.seed = 5;
        other[i] = tiny_submit(g, &s);
        if (k % 6 == 0) engine_cancel(g, other[i]);
    }
    for (int i = 0; i < b->n_requests; i++) {
        if (!other[i]) continue;
        if (i % 2) tiny_wait_tokens(other[i], 3);
        engine_cancel(g, other[i]);
    }
    for (int i = 0; i < b->n_requests; i++) {
        struct engine_progress p = tiny_wait(r[i]);
        keep_result(&b->got[i], &p);
        engine_release(g, r[i]);
        if (other[i]) engine_release(g, other[i]);
        show_progress(b, o, "in batches", i + 1);
    }
    tiny_assert_pool_whole(g);
    engine_get_stats(g, stats);
    engine_close(g);
}

static void compare(const struct bed *b, struct some of, const char *what) {
    for (int i = of.first; i < of.end; i += of.step) {
        const struct bed_record *w = &b->want[i], *r = &b->got[i];
        int same = 0;
        while (same < w->n_out && same < r->n_out && w->out[same] == r->out[same]) same++;
        if (same < w->n_out || r->n_out != w->n_out)
            fail_msg("%s, request %d: token %d is %d, without speculation %d (%d and %d tokens)",
                     what, i, same, same < r->n_out ? r->out[same] : -1,
                     same < w->n_out ? w->out[same] : -1, r->n_out, w->n_out);
        if (r->finish != w->finish)
            fail_msg("%s, request %d: ends with %s, without with %s", what, i,
                     engine_finish_name(r->finish), engine_finish_name(w->finish));
        if (memcmp(r->logprob, w->logprob, (size_t)w->n_out * sizeof *w->logprob) != 0)
            fail_msg("%s, request %d: log-probabilities differ", what, i);
        for (int k = w->n_prompt - 1; k < w->n_prompt + w->n_out - 1; k++)
            if (r->row[k] != w->row[k] || !r->row[k])
                fail_msg("%s, request %d: logits behind position %d differ (prompt %d)", what, i, k,
                         w->n_prompt);
        if (r->n_kv != w->n_kv || r->kv != w->kv)
            fail_msg("%s, request %d: K and V differ (%d and %d positions)", what, i, r->n_kv,
                     w->n_kv);
    }
}

static void clear(struct bed *b) {
    memset(b->got, 0, (size_t)b->n_requests * sizeof *b->got);
}

static void add(struct engine_speculation *sum, const struct engine_speculation *s) {
    sum->n_rounds += s->n_rounds;
    sum->n_drafted += s->n_drafted;
    sum->n_accepted += s->n_accepted;
    sum->n_lookup_drafted += s->n_lookup_drafted;
    sum->n_lookup_accepted += s->n_lookup_accepted;
    sum->n_page_rollbacks += s->n_page_rollbacks;
}

static void add_exact(struct engine_exact *sum, const struct engine_exact *x) {
    sum->n_passes += x->n_passes;
    sum->n_provisional += x->n_provisional;
    sum->n_accepted += x->n_accepted;
    sum->n_tokens += x->n_tokens;
}

/* Dense passes accepted provisional tokens and rejected some: the fewest are 46, of the default
 * pair's greedy answers, at 13.7 tokens a pass. What random weights draw from little context is
 * seldom what they draw from all. */
static void check_exact(const struct bed *b, const struct engine_exact *x) {
    printf(
        "# exact: %llu dense passes, %llu provisional tokens, %llu accepted, %.2f tokens a pass\n",
        (unsigned long long)x->n_passes, (unsigned long long)x->n_provisional,
        (unsigned long long)x->n_accepted, (double)x->n_tokens / (double)x->n_passes);
    fflush(stdout);
    assert_true(x->n_passes > 30);
    assert_true(x->n_accepted > x->n_passes / (b->sampled || b->gumbel ? 8 : 1));
    assert_true(x->n_accepted < x->n_provisional);
    assert_true(x->n_tokens > x->n_accepted);
}

void bed_check(struct bed *b, const int *lengths, int n_lengths, bool batches) {
    struct engine_stats stats;
    struct engine_speculation sum = {0}, looked = {0};
    struct engine_exact exact = {0};
    struct engine_options plain = b->o;
    char what[64];
    const int n = b->n_requests;
    const struct some all = {0, 1, n};
    /* Settings follow a request's number in threes to elevens: every fifth has all of them. */
    int step = b->n_alone > 0 ? n / b->n_alone : batches ? 5 : 1;
    if (step < 1) step = 1;
    const struct some begin = {0, 1, b->n_alone > 0 && b->n_alone < n ? b->n_alone : n};
    b->want = calloc((size_t)b->n_requests, sizeof *b->want);
    b->got = calloc((size_t)b->n_requests, sizeof *b->got);
    assert_non_null(b->want);
    assert_non_null(b->got);
    plain.draft_tokens = 0;
    plain.draft_path = NULL;
    if (b->n_exact) plain.sparse.selector = TARGET_OFF;
    run_alone(b, &plain, all, &stats);
    assert_int_equal(stats.speculation.n_rounds, 0);
    memcpy(b->want, b->got, (size_t)b->n_requests * sizeof *b->want);
    for (int k = 0; k < n_lengths; k++) {
        struct engine_options o = b->o;
        o.draft_path = b->draft;
        o.draft_tokens = lengths[k];
        o.lookup = k % 2;
        if (b->n_exact) o.sparse.exact = b->exact[k % b->n_exact];
        const struct some alone = {k % step, step, n};
        for (int together = 0; together <= batches; together++) {
            snprintf(what, sizeof what, "draft %d%s", lengths[k], together ? ", in batches" : "");
            clear(b);
            if (together) run_together(b, &o, (uint64_t)k, &stats);
            else run_alone(b, &o, alone, &stats);
            compare(b, together ? all : alone, what);
            add(&sum, &stats.speculation);
            add_exact(&exact, &stats.exact);
        }
    }
    if (b->n_exact) b->o.sparse.exact = b->exact[b->n_exact - 1];
    struct engine_options lookup = b->o;
    lookup.draft_tokens = 4;
    clear(b);
    run_alone(b, &lookup, begin, &stats);
    compare(b, begin, "lookup alone");
    add(&looked, &stats.speculation);
    add_exact(&exact, &stats.exact);
    struct engine_options window = b->o;
    window.draft_path = b->draft;
    window.draft_tokens = 4;
    window.draft_window = 128;
    clear(b);
    run_alone(b, &window, begin, &stats);
    compare(b, begin, "windowed draft");
    add(&sum, &stats.speculation);
    add_exact(&exact, &stats.exact);
    if (b->n_exact) check_exact(b, &exact);
    assert_true(sum.n_rounds > 100);
    assert_true(sum.n_accepted > sum.n_drafted / 20);
    assert_true(sum.n_accepted < sum.n_drafted);
    assert_true(sum.n_page_rollbacks > 0);
    assert_true(looked.n_lookup_drafted > 0);
    /* Drawn text of random weights repeats itself rarely: that any of it is right is luck. */
    if (!b->gumbel && !b->sampled) assert_true(looked.n_lookup_accepted > 0);
    free(b->want);
    free(b->got);
    free(b->page);
    b->page = NULL;
}

/* ---- The tiny pair ---- */

void bed_tiny(struct bed *b, const struct tiny_options *t, const struct tiny_draft *d) {
    static char target[256], draft[256];
    memset(b, 0, sizeof *b);
    snprintf(target, sizeof target, "%s", tiny_model_file(t));
    snprintf(draft, sizeof draft, "%s", tiny_draft_file(t, d));
    tiny_engine_options(&b->o);
    b->target = target;
    b->draft = draft;
    b->o.max_seqs = 16;
    b->o.max_rows = 192;
    b->o.kv_memory_bytes = (size_t)400 * TINY_BLOCK_BYTES * (size_t)(t->head_dim / 16);
    b->n_requests = TINY_SLOW ? 12 : 48;
    b->n_out = TINY_SLOW ? 48 : 96;
    b->make = make_tiny;
}

void bed_close_tiny(struct bed *b) {
    unlink(b->target);
    unlink(b->draft);
}

/* ---- The default pair ---- */

static const char *const questions[] = {
    "Write a short story about a lighthouse keeper who finds a map.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "List ten things to pack for a week in the mountains.",
    "Explain why the sky is blue to a child of eight.",
    "Translate into French: The train leaves at nine and arrives before noon.",
    "A shop sells pens at 3 for 2 dollars. What do 18 pens cost? Show each step.",
    "Summarize: Bees live in colonies. Each colony has one queen, some hundred drones and many "
    "thousand workers. Workers gather nectar, feed the larvae and keep the hive warm in winter.",
    "Correct the spelling and repeat the text: Teh quick brwon fox jumps ovr the lazy dog. It was "
    "a "
    "sunny day and the fox was verry happy to be outsde in the feilds.",
    "What is the capital of Australia, and what is it known for?",
    "Give me a recipe for a lentil soup with carrots.",
};

static struct tokenizer *words; /* of the default target */
static struct gguf *words_file;

static void make_chat(const struct bed *b, int i, struct bed_record *r,
                      struct engine_submit_options *s) {
    char text[1024];
    struct err e = {0};
    struct tokens ids = {0};
    int n = (int)(sizeof questions / sizeof *questions);
    static const char *const hints[] = {"", " Be brief.", " Give details.", " Use simple words.",
                                        " Answer in two parts."};
    snprintf(text, sizeof text, "<|im_start|>user\n%s%s%s<|im_end|>\n<|im_start|>assistant\n",
             questions[i % n], hints[i / n % 5], i / (5 * n) ? " Think first." : "");
    assert_ok(tokenizer_encode(words, text, strlen(text), TOKENIZER_PARSE_SPECIAL, &ids, &e), e);
    assert_true(ids.n < BED_MAX_PROMPT);
    r->n_prompt = (int)ids.n;
    memcpy(r->prompt, ids.ids, ids.n * sizeof *r->prompt);
    tokens_deinit(&ids);
    vary(b, i, r, s);
}

/* A question behind others, which were not answered. */
static void make_chat_long(const struct bed *b, int i, struct bed_record *r,
                           struct engine_submit_options *s) {
    static struct bed_record part;
    int n = 0;
    for (int k = 0; n < BED_MAX_PROMPT - 100; k++) {
        make_chat(b, i + 3 * k, &part, s);
        memcpy(r->prompt + n, part.prompt, (size_t)part.n_prompt * sizeof *r->prompt);
        n += part.n_prompt;
    }
    r->n_prompt = n;
    vary(b, i, r, s);
}

void bed_default_pair(struct bed *b, int n_requests, int n_out) {
    struct err e = {0};
    *b = (struct bed){.n_requests = n_requests, .n_out = n_out, .make = make_chat};
    engine_options_default(&b->o);
    b->target = test_default_target();
    b->draft = test_default_draft();
    b->o.max_seqs = 16;
    b->o.max_queue = 2 * BED_MAX_REQUESTS;
    b->o.context = 1024;
    b->o.kv_memory_bytes = (size_t)600 << 20;
    assert_ok(gguf_open(&words_file, b->target, &e), e);
    assert_ok(tokenizer_open_gguf(&words, words_file, &e), e);
}

void bed_close_default_pair(struct bed *b) {
    (void)b;
    tokenizer_close(words);
    gguf_close(words_file);
}

/* ---- Sparse ---- */

void bed_sparse(struct bed *b) {
    struct target_settings *s = &b->o.sparse;
    target_settings_unset(s);
    s->selector = TARGET_OBSERVED;
    s->keep_blocks = 3;
    s->window_blocks = 1;
    s->reserve = 0.2;
    b->make = b->make == make_tiny ? make_tiny_long : make_chat_long;
}

void bed_tiny_sparse(struct bed *b, const struct tiny_options *target, int select_layer) {
    struct tiny_draft d;
    struct tiny_options t = *target;
    t.dtype = KERN_Q8_0;
    tiny_draft_default(&d, &t);
    bed_tiny(b, &t, &d);
    b->o.kv_memory_bytes *= 2;
    b->o.select_layer = select_layer;
    bed_sparse(b);
}
