/* The options maps of requests, read by table: every key known, every number in its range. */
#include <math.h>
#include <string.h>
#include <xxhash.h>

#include "base/err.h"
#include "serve/serve_private.h"

void params__defaults(struct request_options *o) {
    memset(o, 0, sizeof *o);
    verify_params_default(&o->verify);
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
        {"skip_special_tokens", PARAM_BOOL, AT(skip_special_tokens), 0, 0, false}, {               \
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

/* A finite number in [lo, hi], or (lo, hi]. */
static int read_number(const struct param *t, const msgpack_object *v, double *out, struct err *e) {
    if (!rpc_real(v, out))
        return err_raise(e, E_INVALID, "%s must be a number, not %s", t->name, rpc_type_name(v));
    if (t->kind != PARAM_REAL && *out != floor(*out))
        return err_raise(e, E_INVALID, "%s must be an integer, not %g", t->name, *out);
    if (*out < t->lo || *out > t->hi || (t->above_lo && *out <= t->lo))
        return err_raise(e, E_RANGE, "%s is %.15g, allowed is %c%.15g, %.15g]", t->name, *out,
                         t->above_lo ? '(' : '[', t->lo, t->hi);
    return 0;
}

static int read_bool(const struct param *t, const msgpack_object *v, bool *out, struct err *e) {
    if (v->type != MSGPACK_OBJECT_BOOLEAN)
        return err_raise(e, E_INVALID, "%s must be true or false, not %s", t->name,
                         rpc_type_name(v));
    *out = v->via.boolean;
    return 0;
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
        if (!rpc_text(v, &s, &n) || n < 1 || n > 256)
            return err_raise(e, E_INVALID, "cache_salt must be a str of 1 to 256 bytes");
        uint64_t h = XXH3_64bits_withSeed(s, n, salt_seed);
        *(uint64_t *)field = h ? h : 1; /* 0 is "no salt" */
        return 0;
    }
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
