/* What does a round of speculation cost on a CUDA device, and what would it gain?
 *
 *   bench_round --target PATH --draft PATH [--load-format dummy] [--context N] [--draft-tokens G]
 *               [--rounds N] [--acceptance A] [--device NAME]
 *
 * One sequence behind N random tokens, greedy, in the engine itself: G draft steps, the target's
 * pass over G + 1 rows, the decision, one read-back. device_ms is the engine's device time of a
 * round (events from the first enqueued operation to the decision), host_ms the whole step as its
 * thread sees it; means over --rounds rounds. floor_ms: bytes that the round's passes must read
 * (weights without an embedding that is not the head's, KV of every token; G times the draft, once
 * the target) over the run's bandwidth, the better of a device copy and a read-only sweep.
 *
 * Random weights agree on nothing, and time does not depend on it. What is accepted is simulated:
 * with each draft token right with probability A, independently, a round emits
 * (1 - A^(G+1)) / (1 - A) tokens. Columns that follow from it begin with `simulated_`. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/number.h"
#include "base/rng.h"
#include "bench/device_floor.h"
#include "engine/engine.h"
#include "model/source.h"

enum { WARM = 16, PLAIN = 64, MAX_WAIT_MS = 300000 };
static const double h200_bandwidth = 4.2e12;

struct options {
    const char *target, *draft, *device;
    bool dummy;
    int context, draft_tokens, rounds;
    double acceptance;
};

/* Of one pass: bytes that it must read. */
struct model_bytes {
    double weights, kv_token;
};

struct cost {
    double device_ms, host_ms, draft_ms, verify_ms; /* of a step */
};

static void must(int rc, const struct err *e) {
    if (rc == 0) return;
    fprintf(stderr, "bench_round: %s\n", e->message);
    exit(1);
}

static struct model_bytes bytes_of(const char *path) {
    struct model_source *s;
    struct err e = {0};
    struct model_bytes b = {0};
    must(model_source_plan_only(&s, path, &e), &e);
    const struct model_config *c = model_source_config(s);
    for (size_t i = 0; i < model_source_n_tensors(s); i++) {
        const struct tensor_view *v = model_source_tensor_at(s, i);
        if (v->role != TENSOR_TOKEN_EMBD || c->tied) b.weights += (double)v->bytes;
    }
    b.kv_token = 2.0 * c->n_layers * c->n_kv_heads * c->head_dim * 2;
    model_source_close(s);
    return b;
}

/* Bytes a second of the device; 0 where it is the CPU. */
static double bandwidth(const struct options *o, bool *counts) {
    struct kern_options ko = {.precision = KERN_FAST};
    struct kern_device_info info;
    struct device_floor *f;
    struct kern *k;
    struct err e = {0};
    double copy, sweep;
    *counts = false;
    if (!strcmp(o->device, "cpu")) return 0;
    must(kern_cuda_open(&k, &ko, &e), &e);
    must(device_floor_open(&f, k, &e), &e);
    k->ops->info(k, &info);
    size_t bytes = (size_t)4 << 30;
    if (bytes > info.free_bytes / 4) bytes = info.free_bytes / 4;
    must(device_floor_bandwidth(f, bytes, &copy, &sweep, &e), &e);
    device_floor_close(f);
    k->ops->close(k);
    double best = fmax(copy, sweep);
    *counts = !strstr(info.name, "H200") || best >= h200_bandwidth;
    printf("# %s; copy %.0f GB/s, read-only sweep %.0f GB/s%s\n", info.name, copy / 1e9,
           sweep / 1e9, *counts ? "" : ": below 4,200 on an H200, this run does not count");
    return best;
}

static struct engine *open_engine(const struct options *o) {
    struct engine_options eo;
    struct engine *g;
    struct err e = {0};
    engine_options_default(&eo);
    eo.model_path = o->target;
    eo.draft_path = o->draft;
    eo.device = o->device;
    eo.dummy_weights = o->dummy;
    eo.draft_tokens = o->draft_tokens;
    eo.max_draft_tokens = o->draft_tokens;
    eo.lookup = eo.prefix_cache = false;
    eo.max_seqs = 1;
    /* Room for both requests to end, and for tokens that rounds add should any be accepted. */
    eo.context = o->context + (WARM + o->rounds + PLAIN) * (o->draft_tokens + 1) + 64;
    must(engine_open(&g, &eo, NULL, NULL, &e), &e);
    return g;
}

static uint64_t steps_of(const struct engine_stats *s, bool plain) {
    return plain ? s->speculation.n_plain_rounds : s->speculation.n_rounds;
}

/* Wait until the engine has done n rounds (with a draft, or plain ones). */
static void wait_for(struct engine *g, const struct engine_request *r, uint64_t n, bool plain,
                     struct engine_stats *s) {
    int64_t start = clock_ns();
    for (;;) {
        struct engine_progress p;
        engine_get_stats(g, s);
        if (steps_of(s, plain) >= n) return;
        engine_poll(r, &p);
        if (p.finish != ENGINE_RUNNING || clock_ms_since(start) > MAX_WAIT_MS) {
            fprintf(stderr, "bench_round: %s after %d tokens and %llu rounds %s\n",
                    engine_finish_name(p.finish), p.n_tokens,
                    (unsigned long long)s->speculation.n_rounds, p.error);
            exit(1);
        }
        usleep(500);
    }
}

/* Mean costs of `n` steps behind a prompt of --context tokens, after a few that warm up. */
static struct cost measure(struct engine *g, const struct options *o, int n, bool plain) {
    struct engine_submit_options s = {.n_prompt = o->context, .no_prefix_cache = true};
    struct engine_request *r;
    struct engine_stats now, a, b;
    struct err e = {0};
    int32_t *ids = malloc((size_t)o->context * sizeof *ids);
    uint32_t vocab = (uint32_t)tokenizer_n_tokens(engine_tokenizer(g));
    uint64_t seed = (uint64_t)clock_ns();
    ASSERT(ids);
    for (int i = 0; i < o->context; i++)
        ids[i] = (int32_t)(rng_u32(seed, (uint64_t)i, RNG_TEST, 0) % vocab);
    verify_params_default(&s.params);
    s.params.temperature = 0;
    s.params.ignore_eos = true;
    s.params.draft_tokens = plain ? 0 : o->draft_tokens;
    s.params.max_tokens = (WARM + n + PLAIN) * (plain ? 1 : o->draft_tokens + 1);
    s.prompt = ids;
    engine_get_stats(g, &now);
    must(engine_submit(g, &s, &r, &e), &e);
    wait_for(g, r, steps_of(&now, plain) + WARM, plain, &a);
    wait_for(g, r, steps_of(&a, plain) + (uint64_t)n, plain, &b);
    engine_cancel(g, r);
    engine_release(g, r);
    while (!engine_idle(g)) usleep(500);
    free(ids);
    double steps = (double)(b.n_steps - a.n_steps), host = b.step_seconds - a.step_seconds;
    double outside = b.overhead_seconds - a.overhead_seconds;
    return (struct cost){
        .device_ms = (host - outside) / steps * 1e3,
        .host_ms = host / steps * 1e3,
        .draft_ms = (double)(b.speculation.draft_ns - a.speculation.draft_ns) / steps / 1e6,
        .verify_ms = (double)(b.speculation.verify_ns - a.speculation.verify_ns) / steps / 1e6,
    };
}

static void report(const struct options *o, const char *name, bool counts, double floor,
                   const struct cost *c, double tokens, double off_host_ms) {
    printf("%s,%s,%d,%d,%.4f,%.4f,%.4f,%.4f,%.4f,%.4f,%.3f,%.2f,%.3f,%.1f,%.3f\n",
           counts ? "yes" : "no", name, c->draft_ms > 0 ? o->draft_tokens : 0, o->context,
           c->device_ms, c->host_ms, c->host_ms - c->device_ms, c->draft_ms, c->verify_ms, floor,
           floor > 0 ? c->device_ms / floor : 0, o->acceptance, tokens, tokens / c->host_ms * 1e3,
           tokens * off_host_ms / c->host_ms);
}

static bool parse(int argc, char **argv, struct options *o) {
    for (int i = 1; i < argc; i += 2) {
        if (i + 1 == argc) return false;
        const char *word = argv[i], *value = argv[i + 1];
        size_t n = strlen(value);
        bool ok = true;
        if (!strcmp(word, "--target")) o->target = value;
        else if (!strcmp(word, "--draft")) o->draft = value;
        else if (!strcmp(word, "--device")) o->device = value;
        else if (!strcmp(word, "--load-format")) o->dummy = !strcmp(value, "dummy");
        else if (!strcmp(word, "--context")) ok = number_in(value, n, 1, 1 << 20, &o->context);
        else if (!strcmp(word, "--draft-tokens"))
            ok = number_in(value, n, 1, KERN_MAX_DRAFT, &o->draft_tokens);
        else if (!strcmp(word, "--rounds")) ok = number_in(value, n, 1, 10000, &o->rounds);
        else if (!strcmp(word, "--acceptance")) ok = number_real(value, n, &o->acceptance);
        else ok = false;
        if (!ok) return false;
    }
    return o->target && o->draft && o->acceptance >= 0 && o->acceptance < 1;
}

int main(int argc, char **argv) {
    struct options o = {
        .device = "cuda", .context = 8192, .draft_tokens = 4, .rounds = 100, .acceptance = 0.7};
    bool counts;
    if (!parse(argc, argv, &o)) {
        fprintf(stderr, "usage: bench_round --target PATH --draft PATH [--load-format dummy] "
                        "[--context N] [--draft-tokens G] [--rounds N] [--acceptance A] "
                        "[--device NAME]\n");
        return 2;
    }
    double rate = bandwidth(&o, &counts);
    struct model_bytes t = bytes_of(o.target), d = bytes_of(o.draft);
    struct engine *g = open_engine(&o);
    double target_floor = t.weights + t.kv_token * (o.context + o.draft_tokens + 1);
    double draft_floor = d.weights + d.kv_token * (o.context + o.draft_tokens);
    double a = o.acceptance, emitted = (1 - pow(a, o.draft_tokens + 1)) / (1 - a);
    printf("# %s%s; byte floors: target %.3f GB a pass, draft %.3f GB a step\n",
           engine_model_name(g), o.dummy ? ", both models of random weights" : "",
           target_floor / 1e9, draft_floor / 1e9);
    printf("counts,what,g,context,device_ms,host_ms,host_minus_device_ms,draft_ms,verify_ms,floor_"
           "ms,times_floor,simulated_acceptance,simulated_tokens,simulated_tokens_s,simulated_"
           "gain\n");
    double one = t.weights + t.kv_token * (o.context + 1);
    struct cost off = measure(g, &o, o.rounds, true), on = measure(g, &o, o.rounds, false);
    report(&o, "off", counts, rate > 0 ? one / rate * 1e3 : 0, &off, 1, off.host_ms);
    double floor = target_floor + o.draft_tokens * draft_floor;
    report(&o, "round", counts, rate > 0 ? floor / rate * 1e3 : 0, &on, emitted, off.host_ms);
    engine_close(g);
    return 0;
}
