/* The options maps of requests, read by table: every key known, every number in its range. */
#include <math.h>
#include <string.h>
#include <xxhash.h>

#include "base/err.h"
#include "serve/serve_private.h"

void params__defaults(struct request_options *o) {
    memset(o, 0, sizeof *o);
    verify_params_default(&o->verify);
    target_settings_unset(&o->sparse);
    o->stream = true;
    o->prefix_cache = true;
    o->skip_special_tokens = true;
    o->add_special = true;
    o->add_generation_prompt = true;
}

#define AT(field) offsetof(struct request_options, field)
#define COMMON                                                                                     \
    {"max_tokens", PARAM_INT, AT(verify.max_tokens), 1, INT32_MAX, false},                         \
        {"max_completion_tokens", PARAM_INT, AT(verify.max_tokens), 1, INT32_MAX, false},          \
        {"min_tokens", PARAM_INT, AT(verify.min_tokens), 0, INT32_MAX, false},                     \
        {"temperature", PARAM_REAL, AT(verify.temperature), 0, 100, false},                        \
        {"top_p", PARAM_REAL, AT(verify.top_p), 0, 1, true},                                       \
        {"top_k", PARAM_INT, AT(verify.top_k), 0, INT32_MAX, false},                               \
        {"min_p", PARAM_REAL, AT(verify.min_p), 0, 1, false},                                      \
        {"repetition_penalty", PARAM_REAL, AT(verify.repetition_penalty), 0.01, 100, false},       \
        {"presence_penalty", PARAM_REAL, AT(verify.presence_penalty), -2, 2, false},               \
        {"frequency_penalty", PARAM_REAL, AT(verify.frequency_penalty), -2, 2, false},             \
        {"seed", PARAM_SEED, AT(verify.seed), 0, 0, false},                                        \
        {"stop", PARAM_STOP, AT(verify), 0, 0, false},                                             \
        {"logprobs", PARAM_LOGPROBS, AT(verify.logprobs), 0, KERN_MAX_LOGPROBS, false},            \
        {"ignore_eos", PARAM_BOOL, AT(verify.ignore_eos), 0, 0, false},                            \
        {"stream", PARAM_BOOL, AT(stream), 0, 0, false},                                           \
        {"cache_salt", PARAM_SALT, AT(salt), 0, 0, false},                                         \
        {"prefix_cache", PARAM_BOOL, AT(prefix_cache), 0, 0, false},                               \
        {"skip_special_tokens", PARAM_BOOL, AT(skip_special_tokens), 0, 0, false},                 \
        {"draft_tokens", PARAM_DRAFT_TOKENS, AT(verify.draft_tokens), 0, KERN_MAX_DRAFT, false},   \
        {"coupling", PARAM_COUPLING, AT(verify.coupling), 0, 0, false},                            \
        {"draft_model", PARAM_BOOL, AT(verify.draft_model), 0, 0, false},                          \
        {"lookup", PARAM_BOOL, AT(verify.lookup), 0, 0, false},                                    \
        {"sparse", PARAM_SPARSE, AT(sparse.selector), 0, 0, false},                                \
        {"keep", PARAM_KEEP, AT(sparse), 0, 1, true},                                              \
        {"keep_blocks", PARAM_INT, AT(sparse.keep_blocks), 0, TARGET_MOST_BLOCKS, false},          \
        {"min_blocks", PARAM_INT, AT(sparse.min_blocks), 1, TARGET_MOST_BLOCKS, false},            \
        {"window_blocks", PARAM_INT, AT(sparse.window_blocks), 1, TARGET_MOST_BLOCKS, false},      \
        {"reserve", PARAM_REAL, AT(sparse.reserve), 0, 1, false},                                  \
        {"keep_threshold", PARAM_THRESHOLD, AT(sparse.threshold), -1e30, 1e30, false},             \
        {"smooth", PARAM_REAL, AT(sparse.smooth), 0, 1, false},                                    \
        {"reselect", PARAM_RESELECT, AT(sparse.reselect), 1, TARGET_MOST_BLOCKS, false},           \
        {"reselector", PARAM_RESELECTOR, AT(sparse.reselector), 0, 0, false},                      \
        {"surprise", PARAM_REAL, AT(sparse.surprise), 0, 100, true},                               \
        {"recheck", PARAM_RECHECK, AT(sparse.recheck), 0, 0, false},                               \
        {"drop", PARAM_BELOW, AT(sparse.drop), 0, 1, false},                                       \
        {"exact", PARAM_EXACT, AT(sparse.exact), 0, TARGET_MOST_EXACT, false},                     \
        {"prefill", PARAM_PREFILL, AT(sparse.prefill), 0, 0, false},                               \
        {"prefill_dense", PARAM_INT, AT(sparse.prefill_dense), 0, TARGET_MOST_BLOCKS, false},      \
        {"prefill_chunk", PARAM_INT,          AT(sparse.prefill_chunk),                            \
         TARGET_BLOCK,    TARGET_MOST_BLOCKS, false},                                              \
        {"lists", PARAM_LISTS, AT(sparse.lists), 0, 0, false},                                     \
        {"select2", PARAM_INT, AT(sparse.select2), 0, TARGET_MOST_BLOCKS, false},                  \
        {"quarters", PARAM_INT, AT(sparse.quarters), 1, TARGET_QUARTERS, false},                   \
        {"drafted", PARAM_BOOL, AT(drafted), 0, 0, false},                                         \
        {"conversation", PARAM_CONVERSATION, AT(conversation), 0, 0, false}, {                     \
        "n", PARAM_ONE, 0, 0, 0, false                                                             \
    }

const struct param params__generate[] = {
    COMMON,
    {"add_special_tokens", PARAM_BOOL, AT(add_special), 0, 0, false},
    {"parse_special_tokens", PARAM_BOOL, AT(parse_special), 0, 0, false},
    {0},
};
const struct param params__chat[] = {
    COMMON,
    {"add_generation_prompt", PARAM_BOOL, AT(add_generation_prompt), 0, 0, false},
    {0},
};

static int read_stop(const msgpack_object *v, struct verify_params *p, struct err *e) {
    const msgpack_object *list = v;
    uint32_t n = 1;
    if (v->type == MSGPACK_OBJECT_ARRAY) {
        list = v->via.array.ptr;
        n = v->via.array.size;
    }
    if (n > VERIFY_MAX_STOPS)
        return err_raise(e, E_RANGE, "stop holds %u strings, at most %d", n, VERIFY_MAX_STOPS);
    for (uint32_t i = 0; i < n; i++) {
        const char *s;
        size_t k;
        if (!rpc_text(&list[i], &s, &k))
            return err_raise(e, E_INVALID, "stop must be a str or an array of them, not %s",
                             rpc_type_name(&list[i]));
        if (k < 1 || k > VERIFY_MAX_STOP_BYTES)
            return err_raise(e, E_RANGE, "a stop string must have 1 to %d bytes, not %zu",
                             VERIFY_MAX_STOP_BYTES, k);
        p->stops[i].n = (int)k;
        memcpy(p->stops[i].text, s, k);
    }
    p->n_stops = (int)n;
    return 0;
}

/* A finite number in [lo, hi], or (lo, hi], or [lo, hi). */
static int read_number(const struct param *t, const msgpack_object *v, double *out, struct err *e) {
    bool real = t->kind == PARAM_REAL || t->kind == PARAM_BELOW, below = t->kind == PARAM_BELOW;
    if (!rpc_real(v, out))
        return err_raise(e, E_INVALID, "%s must be a number, not %s", t->name, rpc_type_name(v));
    if (!real && *out != floor(*out))
        return err_raise(e, E_INVALID, "%s must be an integer, not %g", t->name, *out);
    if (*out < t->lo || *out > t->hi || (t->above_lo && *out <= t->lo) || (below && *out >= t->hi))
        return err_raise(e, E_RANGE, "%s is %.15g, allowed is %c%.15g, %.15g%c", t->name, *out,
                         t->above_lo ? '(' : '[', t->lo, t->hi, below ? ')' : ']');
    return 0;
}

static int read_bool(const struct param *t, const msgpack_object *v, bool *out, struct err *e) {
    if (v->type != MSGPACK_OBJECT_BOOLEAN)
        return err_raise(e, E_INVALID, "%s must be true or false, not %s", t->name,
                         rpc_type_name(v));
    *out = v->via.boolean;
    return 0;
}

enum { MAX_NAME_BYTES = 256 }; /* of cache_salt and conversation */

/* One 64-bit number, never 0, for `n` bytes; `kind` keeps names, numbers and connections apart. */
static uint64_t number_of(char kind, const void *bytes, size_t n, uint64_t seed) {
    char tagged[1 + MAX_NAME_BYTES] = {kind};
    ASSERT(n <= MAX_NAME_BYTES);
    memcpy(tagged + 1, bytes, n);
    uint64_t h = XXH3_64bits_withSeed(tagged, 1 + n, seed);
    return h ? h : 1;
}

uint64_t params__conversation_of(uint64_t connection, uint64_t salt_seed) {
    return number_of('c', &connection, sizeof connection, salt_seed);
}

static int read_conversation(struct request_options *o, const msgpack_object *v, uint64_t seed,
                             struct err *e) {
    const char *s;
    size_t n = 0;
    uint64_t id;
    if (rpc_text(v, &s, &n) && n >= 1 && n <= MAX_NAME_BYTES) {
        o->conversation = number_of('t', s, n, seed);
    } else if (!rpc_is_text(v) && rpc_u64(v, &id)) {
        o->conversation = number_of('n', &id, sizeof id, seed);
    } else if (v->type == MSGPACK_OBJECT_BOOLEAN && !v->via.boolean) {
        o->conversation = 0;
    } else if (rpc_is_text(v)) {
        return err_raise(e, E_RANGE, "conversation has %zu bytes, allowed is [1, %d]", n,
                         MAX_NAME_BYTES);
    } else {
        return err_raise(e, E_INVALID,
                         "conversation must be a str, an integer from 0 to 2^64 - 1, or false");
    }
    o->has_conversation = true;
    return 0;
}

/* "auto" or a number; the text is that of verify_draft_tokens_check. */
static int read_draft_tokens(const struct param *t, const msgpack_object *v, int *out,
                             struct err *e) {
    double x;
    if (rpc_text_is(v, "auto")) {
        *out = VERIFY_DRAFT_AUTO;
        return 0;
    }
    if (!rpc_real(v, &x) || x != floor(x))
        return err_raise(e, E_INVALID, "%s must be \"auto\" or an integer in [0, %d]", t->name,
                         KERN_MAX_DRAFT);
    if (x < t->lo || x > t->hi)
        return err_raise(e, E_RANGE, "%s is %.15g, allowed is \"auto\" or [0, %d]", t->name, x,
                         KERN_MAX_DRAFT);
    *out = (int)x;
    return 0;
}

/* A selector's name, or false. */
static int read_sparse(const struct param *t, const msgpack_object *v, int *out, struct err *e) {
    const char *s;
    size_t n;
    if (v->type == MSGPACK_OBJECT_BOOLEAN && !v->via.boolean) {
        *out = TARGET_OFF;
        return 0;
    }
    if (!rpc_text(v, &s, &n))
        return err_raise(e, E_INVALID, "%s must be a str or false, not %s", t->name,
                         rpc_type_name(v));
    return target_selector_parse(out, s, n, e);
}

/* "curve", a curve's points, or a number. */
static int read_keep(const struct param *t, const msgpack_object *v, struct target_settings *out,
                     struct err *e) {
    const char *s;
    size_t n;
    double x;
    if (rpc_text(v, &s, &n)) return target_keep_parse(out, s, n, e);
    if (!rpc_real(v, &x))
        return err_raise(e, E_INVALID,
                         "%s must be \"curve\", points TOKENS:KEEP,... or a number in (0, 1]",
                         t->name);
    if (!(x > t->lo && x <= t->hi))
        return err_raise(e, E_RANGE, "%s is %.15g, allowed is \"curve\" or (0, 1]", t->name, x);
    out->keep = x;
    return 0;
}

static bool is_false(const msgpack_object *v) {
    return v->type == MSGPACK_OBJECT_BOOLEAN && !v->via.boolean;
}

/* "off", false, or a number. */
static int read_threshold(const struct param *t, const msgpack_object *v, double *out,
                          struct err *e) {
    if (is_false(v) || rpc_text_is(v, "off")) {
        *out = TARGET_NO_THRESHOLD;
        return 0;
    }
    if (!rpc_real(v, out))
        return err_raise(e, E_INVALID, "%s must be a number, \"off\" or false, not %s", t->name,
                         rpc_type_name(v));
    if (!(*out >= t->lo && *out <= t->hi))
        return err_raise(e, E_RANGE, "%s is %.15g, allowed is [%g, %g]", t->name, *out, t->lo,
                         t->hi);
    return 0;
}

/* When, by name, or after how many tokens. */
static int read_reselect(const struct param *t, const msgpack_object *v, int *out, struct err *e) {
    const char *s;
    size_t n;
    double x;
    if (is_false(v)) {
        *out = TARGET_RESELECT_OFF;
        return 0;
    }
    if (rpc_text(v, &s, &n)) return target_reselect_parse(out, s, n, e);
    if (!rpc_real(v, &x) || x != floor(x))
        return err_raise(e, E_INVALID,
                         "%s must be \"off\", \"step\", \"surprise\" or an integer in [1, %d]",
                         t->name, TARGET_MOST_BLOCKS);
    if (x < t->lo || x > t->hi)
        return err_raise(
            e, E_RANGE, "%s is %.15g, allowed is \"off\", \"step\", \"surprise\" or [1, %d] tokens",
            t->name, x, TARGET_MOST_BLOCKS);
    *out = (int)x;
    return 0;
}

static int read_reselector(const struct param *t, const msgpack_object *v, int *out,
                           struct err *e) {
    const char *s;
    size_t n;
    if (!rpc_text(v, &s, &n))
        return err_raise(e, E_INVALID, "%s must be a str, not %s", t->name, rpc_type_name(v));
    return target_reselector_parse(out, s, n, e);
}

static int read_recheck(const struct param *t, const msgpack_object *v, int *out, struct err *e) {
    const char *s;
    size_t n;
    if (!rpc_text(v, &s, &n))
        return err_raise(e, E_INVALID, "%s must be a str, not %s", t->name, rpc_type_name(v));
    return target_recheck_parse(out, s, n, e);
}

static int read_prefill(const struct param *t, const msgpack_object *v, int *out, struct err *e) {
    const char *s;
    size_t n;
    if (!rpc_text(v, &s, &n))
        return err_raise(e, E_INVALID, "%s must be a str, not %s", t->name, rpc_type_name(v));
    return target_prefill_parse(out, s, n, e);
}

static int read_lists(const struct param *t, const msgpack_object *v, int *out, struct err *e) {
    const char *s;
    size_t n;
    if (!rpc_text(v, &s, &n))
        return err_raise(e, E_INVALID, "%s must be a str, not %s", t->name, rpc_type_name(v));
    return target_lists_parse(out, s, n, e);
}

/* A number of tokens; true is the most, false none. */
static int read_exact(const struct param *t, const msgpack_object *v, int *out, struct err *e) {
    double x;
    if (v->type == MSGPACK_OBJECT_BOOLEAN) {
        *out = v->via.boolean ? TARGET_MOST_EXACT : 0;
        return 0;
    }
    if (!rpc_real(v, &x) || x != floor(x))
        return err_raise(e, E_INVALID, "%s must be true, false or an integer in [0, %d], not %s",
                         t->name, TARGET_MOST_EXACT, rpc_type_name(v));
    if (x < t->lo || x > t->hi)
        return err_raise(e, E_RANGE, "%s is %.15g, allowed is true, false or [0, %d]", t->name, x,
                         TARGET_MOST_EXACT);
    *out = (int)x;
    return 0;
}

static int read_coupling(const struct param *t, const msgpack_object *v, enum verify_coupling *out,
                         struct err *e) {
    const char *s;
    size_t n;
    if (!rpc_text(v, &s, &n))
        return err_raise(e, E_INVALID, "%s must be \"lossless\" or \"gumbel\", not %s", t->name,
                         rpc_type_name(v));
    return verify_coupling_parse(out, s, n, e);
}

static int read_value(const struct param *t, void *out, const msgpack_object *v, uint64_t salt_seed,
                      struct err *e) {
    char *field = (char *)out + t->offset;
    double x;
    int rc = 0;
    switch (t->kind) {
    case PARAM_BOOL:
        return read_bool(t, v, (bool *)field, e);
    case PARAM_REAL:
    case PARAM_BELOW:
        if ((rc = read_number(t, v, &x, e)) == 0) *(double *)field = x;
        return rc;
    case PARAM_INT:
        if ((rc = read_number(t, v, &x, e)) == 0) *(int *)field = (int)x;
        return rc;
    case PARAM_SIZE:
        if ((rc = read_number(t, v, &x, e)) == 0) *(size_t *)field = (size_t)x;
        return rc;
    case PARAM_LOGPROBS: /* true is the token's own, a number adds alternatives */
        if (v->type == MSGPACK_OBJECT_BOOLEAN) {
            *(int *)field = v->via.boolean ? 0 : -1;
            return 0;
        }
        if ((rc = read_number(t, v, &x, e)) == 0) *(int *)field = (int)x;
        return rc;
    case PARAM_SEED:
        if (!rpc_u64(v, (uint64_t *)field))
            return err_raise(e, E_RANGE, "seed must be an integer from 0 to 2^64 - 1");
        ((struct request_options *)out)->verify.has_seed = true;
        return 0;
    case PARAM_STOP:
        return read_stop(v, (struct verify_params *)field, e);
    case PARAM_SALT: {
        const char *s;
        size_t n;
        if (!rpc_text(v, &s, &n) || n < 1 || n > MAX_NAME_BYTES)
            return err_raise(e, E_INVALID, "cache_salt must be a str of 1 to %d bytes",
                             MAX_NAME_BYTES);
        *(uint64_t *)field = number_of('s', s, n, salt_seed); /* 0 is "no salt" */
        return 0;
    }
    case PARAM_CONVERSATION:
        return read_conversation(out, v, salt_seed, e);
    case PARAM_DRAFT_TOKENS:
        return read_draft_tokens(t, v, (int *)field, e);
    case PARAM_SPARSE:
        return read_sparse(t, v, (int *)field, e);
    case PARAM_KEEP:
        return read_keep(t, v, (struct target_settings *)field, e);
    case PARAM_THRESHOLD:
        return read_threshold(t, v, (double *)field, e);
    case PARAM_RESELECT:
        return read_reselect(t, v, (int *)field, e);
    case PARAM_EXACT:
        return read_exact(t, v, (int *)field, e);
    case PARAM_PREFILL:
        return read_prefill(t, v, (int *)field, e);
    case PARAM_LISTS:
        return read_lists(t, v, (int *)field, e);
    case PARAM_RESELECTOR:
        return read_reselector(t, v, (int *)field, e);
    case PARAM_RECHECK:
        return read_recheck(t, v, (int *)field, e);
    case PARAM_COUPLING:
        return read_coupling(t, v, (enum verify_coupling *)field, e);
    case PARAM_TEXT: {
        struct param_text *text = (struct param_text *)field;
        if (!rpc_text(v, &text->s, &text->n))
            return err_raise(e, E_INVALID, "%s must be a str, not %s", t->name, rpc_type_name(v));
        return 0;
    }
    case PARAM_ONE: {
        int64_t one;
        if (!rpc_int(v, 1, 1, &one))
            return err_raise(e, E_RANGE, "%s must be 1: one answer a request", t->name);
        return 0;
    }
    }
    return err_raise(e, E_INVALID, "%s", t->name);
}

static int unknown(const struct param *table, const char *s, size_t n, struct err *e) {
    const char *names[64];
    size_t n_names = 0;
    for (const struct param *t = table; t->name && n_names < 64; t++) names[n_names++] = t->name;
    const char *near = rpc_suggest(s, n, names, n_names);
    int shown = n > 64 ? 64 : (int)n;
    if (near)
        return err_raise(e, E_INVALID, "unknown option \"%.*s\"; did you mean \"%s\"?", shown, s,
                         near);
    return err_raise(e, E_INVALID, "unknown option \"%.*s\"", shown, s);
}

int params__read(const struct param *table, void *out, const msgpack_object *map,
                 uint64_t salt_seed, const char **bad, struct err *e) {
    *bad = NULL;
    if (map->type == MSGPACK_OBJECT_NIL) return 0;
    if (map->type != MSGPACK_OBJECT_MAP)
        return err_raise(e, E_INVALID, "options must be a map, not %s", rpc_type_name(map));
    for (uint32_t i = 0; i < map->via.map.size; i++) {
        const msgpack_object_kv *kv = &map->via.map.ptr[i];
        const char *s = "";
        size_t n = 0;
        rpc_text(&kv->key, &s, &n); /* the scanner passed no other keys */
        if (n >= 2 && memcmp(s, "x_", 2) == 0) continue;
        const struct param *t = table;
        while (t->name && !(strlen(t->name) == n && memcmp(t->name, s, n) == 0)) t++;
        if (!t->name) return unknown(table, s, n, e);
        if (kv->val.type == MSGPACK_OBJECT_NIL) continue; /* nil: the default */
        int rc = read_value(t, out, &kv->val, salt_seed, e);
        if (rc != 0) {
            *bad = t->name;
            return rc;
        }
    }
    return 0;
}
