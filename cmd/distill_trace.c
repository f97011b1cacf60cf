/* A window through the target: prompt rows in big passes, a look of up to 64 rows where a place is,
 * and what the select layers' states were there. */
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "cmd/distill.h"
#include "target/target.h"

struct tracing {
    struct target_trace *t;
    const struct distill_trace_options *o;
    const struct distill_window *w;
    int hidden, n_blocks; /* capacity of every line */
    float *lines;         /* [n_places][1 + n_layers * TARGET_N_LABELS][n_blocks] */
    float *sum;           /* [n_blocks] ACCUMULATED */
};

static size_t n_lines(const struct tracing *x) {
    return 1 + (size_t)x->o->content.n_layers * TARGET_N_LABELS;
}
static float *line(const struct tracing *x, int place, size_t i) {
    return x->lines + ((size_t)place * n_lines(x) + i) * (size_t)x->n_blocks;
}
static float *line_of(const struct tracing *x, int place, int layer_idx, int label) {
    return line(x, place, 1 + (size_t)layer_idx * TARGET_N_LABELS + (size_t)label);
}
static bool has_label(const struct tracing *x, enum target_label l) {
    return x->o->content.labels >> l & 1;
}

/* Add a look's rows to the text's sum. */
static void accumulate(struct tracing *x, const struct target_masses *m) {
    float now[TARGET_MAX_TRAIN_BLOCKS];
    target_label_of(TARGET_LABEL_ACCUMULATED, m, m->first_layer, m->n_blocks, now);
    for (int b = 0; b < m->n_blocks; b++) x->sum[b] += now[b];
}

/* Append ids[n]; where every row counts, by looks. *observed (NULL: not wanted) gets what the last
 * rows saw. */
static int go(struct tracing *x, const int32_t *ids, int n, float *observed, bool *has_observed,
              struct err *e) {
    const float *mass = NULL;
    int rc = 0, at = 0, look = observed ? TARGET_ROWS : 0;
    if (look > n) look = 0;
    if (has_label(x, TARGET_LABEL_ACCUMULATED))
        for (int take; !rc && at < n - look; at += take) {
            struct target_masses m;
            take = n - look - at < TARGET_TRACE_LOOK ? n - look - at : TARGET_TRACE_LOOK;
            rc = target_trace_look(x->t, ids + at, take, &m, e);
            if (!rc) accumulate(x, &m);
        }
    if (!rc && at < n) rc = target_trace_prompt(x->t, ids + at, n - at, look, &mass, e);
    *has_observed = !rc && look > 0;
    if (*has_observed)
        memcpy(observed, mass, sizeof *mass * (size_t)target_n_blocks(target_trace_n_tokens(x->t)));
    return rc;
}

/* A made prompt's place: from the common tokens to its question. A question of fewer than the rows
 * that are looked at has some of the common ones looked at again. */
static int go_question(struct tracing *x, const struct distill_place *p, float *observed,
                       bool *has_observed, struct err *e) {
    int n_common = x->w->n_common, from = n_common;
    if (observed && p->n_tail < TARGET_ROWS) from = p->n_tokens - TARGET_ROWS;
    int rc = target_trace_rewind(x->t, from, e);
    const float *mass = NULL;
    if (!rc && from < n_common)
        rc = target_trace_prompt(x->t, x->w->ids.ids + from, n_common - from, n_common - from,
                                 &mass, e);
    if (!rc && mass) memcpy(observed, mass, sizeof *mass * (size_t)target_n_blocks(n_common));
    if (!rc)
        rc = target_trace_prompt(x->t, p->tail, p->n_tail, observed ? TARGET_ROWS : 0, &mass, e);
    *has_observed = !rc && observed;
    for (int b = 0; *has_observed && b < target_n_blocks(p->n_tokens); b++)
        if (mass[b] > observed[b]) observed[b] = mass[b];
    return rc;
}

/* What follows place i, by every candidate layer. */
static int look(struct tracing *x, int i, struct err *e) {
    const struct distill_place *p = &x->w->place[i];
    struct target_masses m;
    int rc = target_trace_look(x->t, p->next, p->n_next, &m, e);
    if (rc) return rc;
    if (has_label(x, TARGET_LABEL_ACCUMULATED)) accumulate(x, &m);
    for (int l = 0; l < x->o->content.n_layers; l++)
        for (int label = 0; label < TARGET_N_LABELS; label++)
            if (has_label(x, (enum target_label)label) && label != TARGET_LABEL_ACCUMULATED)
                target_label_of((enum target_label)label, &m, x->o->content.layer[l],
                                target_n_blocks(p->n_tokens), line_of(x, i, l, label));
    return 0;
}

/* ---- Samples ---- */

/* The places of one layer's window: which blocks, how many states. */
static void count(const struct tracing *x, struct target_window *out) {
    const struct distill_window *w = x->w;
    int n_shared = w->is_facts ? w->n_common / TARGET_BLOCK : x->n_blocks;
    *out = (struct target_window){.domain = w->domain,
                                  .source = w->source,
                                  .is_held_out = w->is_held_out,
                                  .labels = x->o->content.labels,
                                  .has_quarters = x->o->content.has_quarters};
    for (int i = 0; i < w->n_places; i++) {
        int n_tokens = w->place[i].n_tokens;
        int end = target_n_blocks(n_tokens) - TARGET_WINDOW_BLOCKS;
        if (end > n_shared) end = n_shared;
        if (end < 2) { /* nothing to decide on */
            out->n_places = out->n_blocks = 0;
            return;
        }
        out->place[out->n_places++] = (struct target_place){
            .n_tokens = n_tokens,
            .n_queries = x->o->content.n_queries < n_tokens ? x->o->content.n_queries : n_tokens,
            .first = 1,
            .n = end - 1};
        if (end > out->n_blocks) out->n_blocks = end;
    }
}

/* Where places' samples go; a window of none has no arrays. */
static int make_windows(const struct tracing *x, struct target_window *out, struct err *e) {
    int rc = 0;
    for (int l = 0; l < x->o->content.n_layers; l++) out[l] = (struct target_window){0};
    for (int l = 0; l < x->o->content.n_layers && !rc; l++) {
        count(x, &out[l]);
        rc = target_window_alloc(&out[l], x->hidden, e);
    }
    return rc;
}

/* The newest states at the trace's end as a place's queries, of every layer. */
static int take_queries(const struct tracing *x, int place, struct target_window *out,
                        struct err *e) {
    int rc = 0;
    for (int l = 0; l < x->o->content.n_layers && !rc; l++) {
        struct target_place *p = &out[l].place[place];
        rc = target_trace_states(x->t, l, p->n_tokens - p->n_queries, p->n_queries, p->query, e);
        for (int q = 0; q < p->n_queries && !rc; q++)
            target_norm(p->query + (size_t)q * (size_t)x->hidden, x->hidden);
    }
    return rc;
}

/* Which blocks hold how much of the fact that place i asks for. */
static void take_mark(const struct tracing *x, int i, struct target_place *p) {
    const struct distill_place *at = &x->w->place[i];
    for (int t = at->mark_first; t < at->mark_first + at->n_mark; t++) {
        int b = t / TARGET_BLOCK - p->first;
        if (b >= 0 && b < p->n) p->mark[b] += 1.f / (float)at->n_mark;
    }
}

/* Labels, the mark and what was observed, once all is seen. */
static void take_labels(const struct tracing *x, int place, bool has_observed,
                        struct target_window *out) {
    for (int l = 0; l < x->o->content.n_layers; l++) {
        struct target_place *p = &out[l].place[place];
        for (int label = 0; label < TARGET_N_LABELS; label++) {
            const float *from =
                label == TARGET_LABEL_ACCUMULATED ? x->sum : line_of(x, place, l, label);
            if (p->label[label])
                memcpy(p->label[label], from + p->first, (size_t)p->n * sizeof *from);
        }
        take_mark(x, place, p);
        if (has_observed)
            memcpy(p->observed, line(x, place, 0) + p->first, (size_t)p->n * sizeof *p->observed);
    }
}

static int take_planes(const struct tracing *x, struct target_window *out, struct err *e) {
    const struct kern_plane shape = {.cols = x->hidden, .has_first = x->o->by_first};
    size_t floats = kern_plane_bytes(&shape) / sizeof(float);
    int n = out[0].n_blocks, rc = 0;
    float *plane = malloc((size_t)n * floats * sizeof *plane + 1);
    if (!plane) return err_raise(e, E_NOMEM, "no memory for %d blocks", n);
    for (int l = 0; l < x->o->content.n_layers && !rc && n > 0; l++) {
        rc = target_trace_plane(x->t, l, 0, n, plane, e);
        if (!rc) target_window_represent(&out[l], plane, x->hidden, x->o->by_first, x->o->by_first);
    }
    free(plane);
    return rc;
}

static int trace(struct tracing *x, struct target_window *out, struct err *e) {
    const struct distill_window *w = x->w;
    bool observed[TARGET_MAX_PLACES] = {0};
    int at = 0, rc = target_trace_rewind(x->t, 0, e);
    if (!rc && w->is_facts) rc = go(x, w->ids.ids, w->n_common, NULL, &observed[0], e);
    for (int i = 0; i < out[0].n_places && !rc; i++) {
        const struct distill_place *p = &w->place[i];
        float *seen = w->is_held_out ? line(x, i, 0) : NULL;
        if (w->is_facts) rc = go_question(x, p, seen, &observed[i], e);
        else rc = go(x, w->ids.ids + at, p->n_tokens - at, seen, &observed[i], e);
        if (!rc) rc = take_queries(x, i, out, e);
        if (!rc) rc = look(x, i, e);
        at = p->n_tokens + p->n_next;
    }
    if (!rc) rc = take_planes(x, out, e);
    for (int i = 0; i < out[0].n_places && !rc; i++) take_labels(x, i, observed[i], out);
    return rc;
}

int distill_trace_window(struct target_trace *t, const struct distill_trace_options *o,
                         const struct distill_window *w, int hidden, struct target_window *out,
                         struct err *e) {
    struct tracing x = {.t = t, .o = o, .w = w, .hidden = hidden};
    x.n_blocks = target_n_blocks((int)w->ids.n + TARGET_TRACE_LOOK);
    if (x.n_blocks > TARGET_MAX_TRAIN_BLOCKS)
        return err_raise(e, E_RANGE, "a window of %d blocks: at most %d can be trained on",
                         x.n_blocks, TARGET_MAX_TRAIN_BLOCKS);
    size_t lines = (size_t)w->n_places * n_lines(&x) + 1;
    x.lines = calloc(lines * (size_t)x.n_blocks, sizeof *x.lines);
    if (!x.lines) return err_raise(e, E_NOMEM, "no memory for labels");
    x.sum = x.lines + (lines - 1) * (size_t)x.n_blocks;
    int rc = make_windows(&x, out, e);
    if (!rc) rc = trace(&x, out, e);
    free(x.lines);
    for (int l = 0; l < o->content.n_layers && rc; l++) target_window_free(&out[l]);
    return rc;
}
