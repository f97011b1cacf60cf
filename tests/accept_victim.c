#include "tests/accept_victim.h"

#include <math.h>
#include <string.h>

#include "tests/harness.h"
#include "tests/sample_twin.h"

enum { V = VICTIM_VOCAB };

struct kern_sample accept_mixed(int i) {
    struct kern_sample p = twin_neutral();
    p.temperature = i % 4 == 3 ? 0 : i % 2 ? 0.7f : 1.1f;
    p.top_k = i % 3 == 1 ? 20 : 0;
    p.top_p = i % 5 == 2 ? 0.9f : 1;
    p.min_p = i % 7 == 3 ? 0.02f : 0;
    p.gumbel = i % 6 == 4;
    p.seed = (uint64_t)i / 3;
    p.position = i;
    p.n_logprobs = i % 4 == 1 ? 5 : 0;
    p.want_logprob = i % 8 == 2;
    p.n_banned = i % 9 == 5 ? 2 : 0;
    p.banned[0] = 3, p.banned[1] = 11;
    return p;
}

/* Where it is decided. */
struct court {
    victim_run_fn *run;
    void *backend;
};

static void make(struct victim *v, bool with_q) {
    *v = (struct victim){.draft = {2, 5}, .round = {2, 0, 0, with_q ? 0 : -1}};
    v->probs = (struct kern_draft_probs){v->q, V, V, NULL};
    for (int r = 0; r < 3; r++) {
        v->p[r] = twin_neutral();
        v->p[r].position = r;
        v->p[r].temperature = 0;
        if (r < 2) v->x[r * V + v->draft[r]] = 9, v->q[r * V + v->draft[r]] = 1;
    }
    v->x[2 * V + 6] = 9;
}

static void check(const struct court *c, struct victim *v, int n_accepted, int32_t token) {
    c->run(c->backend, v);
    assert_int_equal(v->n_accepted[0], n_accepted);
    for (int r = 0; r < n_accepted; r++) assert_int_equal(v->out[r].token, v->draft[r]);
    assert_int_equal(v->out[n_accepted].token, token);
    for (int r = n_accepted + 1; r < 3; r++)
        for (size_t b = 0; b < sizeof v->out[r]; b++)
            assert_int_equal(((uint8_t *)&v->out[r])[b], 0xEE);
}

static void check_rows(const struct court *c, bool with_q) {
    static const int32_t bad_tokens[] = {-1, V, INT32_MAX, INT32_MIN};
    struct victim v;
    make(&v, with_q);
    check(c, &v, 2, 6);
    for (int row = 0; row < 3; row++) {
        for (int at = 0; at < V; at++) {
            make(&v, with_q);
            v.x[row * V + at] = NAN;
            check(c, &v, row, -1);
        }
        make(&v, with_q); /* nothing left to draw */
        v.p[row].n_banned = V;
        for (int i = 0; i < V; i++) v.p[row].banned[i] = i;
        check(c, &v, row, -1);
        make(&v, with_q);
        v.x[row * V + 3] = INFINITY; /* chance cannot choose */
        v.p[row].temperature = 1;
        check(c, &v, row, -1);
    }
    /* A NaN behind the end of a round is not told. */
    make(&v, with_q);
    v.draft[0] = 4;
    v.q[2] = 0, v.q[4] = 1;
    v.x[V + 1] = v.x[2 * V + 1] = NAN;
    check(c, &v, 0, 2);
    for (int i = 0; i < 4; i++) {
        make(&v, with_q);
        v.draft[1] = bad_tokens[i];
        check(c, &v, 1, with_q ? -1 : 5);
    }
}

static void check_bad_q(const struct court *c) {
    static const float bad_q[] = {NAN, -1, -1e-30f, INFINITY, -INFINITY};
    struct victim v;
    for (int i = 0; i < 5; i++)
        for (int t = 0; t < 2; t++) {
            make(&v, true);
            v.p[1].temperature = (float)t;
            v.q[V + 5] = bad_q[i];
            check(c, &v, 1, -1);
            make(&v, true); /* elsewhere: seen where the residual needs it */
            v.p[0].temperature = (float)t;
            v.draft[0] = 4;
            v.q[4] = t ? 1e9f : 1; /* surely refused */
            v.q[2] = bad_q[i];
            check(c, &v, 0, -1);
        }
}

void victims_check(victim_run_fn *run, void *backend) {
    const struct court c = {run, backend};
    struct victim v;
    check_rows(&c, false);
    check_rows(&c, true);
    check_bad_q(&c);
    /* A draft token that q calls impossible: the target alone decides. */
    make(&v, true);
    memset(v.q, 0, sizeof v.q);
    check(&c, &v, 2, 6);
    v.draft[0] = 4;
    check(&c, &v, 0, 2);
    /* No residual is left, though q's token was another one: p decides. */
    make(&v, true);
    v.draft[0] = 4;
    v.q[4] = 1, v.q[2] = 1;
    check(&c, &v, 0, 2);
    v.p[0].temperature = 1; /* the same with every token in play */
    for (int i = 0; i < V; i++) v.q[i] = 1;
    for (int seed = 0; seed < 50; seed++) {
        v.p[0].seed = (uint64_t)seed;
        run(backend, &v);
        assert_in_range(v.out[0].token, 0, V - 1);
    }
    /* A head that lacks the draft token's column, or ends before it. */
    static const int32_t ids[2] = {0, 7};
    make(&v, true);
    v.probs = (struct kern_draft_probs){v.q, 2, 2, ids};
    memset(v.q, 0, sizeof v.q);
    check(&c, &v, 2, 6);
    make(&v, true);
    v.probs.n = 1;
    v.q[0] = v.q[V] = 0;
    check(&c, &v, 2, 6);
}
