/* Windows in memory and in a file. A record is its counts, its floats and a checksum of both; a
 * file begins with a key, so that windows of other texts or options are not taken for ours. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <xxhash.h>

#include "base/checked.h"
#include "base/err.h"
#include "target/train.h"

/* ---- In memory ---- */

static size_t count_floats(const struct target_window *w, size_t h) {
    size_t n = (size_t)w->n_blocks * h * (w->has_quarters ? 5 : 1);
    size_t lines = 2 + (size_t)__builtin_popcount(w->labels); /* the mark, what was observed */
    for (int i = 0; i < w->n_places; i++)
        n += (size_t)w->place[i].n_queries * h + lines * (size_t)w->place[i].n;
    return n;
}

int target_window_alloc(struct target_window *w, int hidden, struct err *e) {
    size_t h = (size_t)hidden;
    ASSERT(w->labels >> TARGET_N_LABELS == 0);
    w->n_floats = count_floats(w, h);
    w->floats = calloc(w->n_floats + 1, sizeof *w->floats);
    if (!w->floats)
        return err_raise(e, E_NOMEM, "no memory for a window of %zu floats", w->n_floats);
    float *at = w->floats;
    w->rep = at;
    at += (size_t)w->n_blocks * h;
    w->quarter = w->has_quarters ? at : NULL;
    if (w->has_quarters) at += 4 * (size_t)w->n_blocks * h;
    for (int i = 0; i < w->n_places; i++) {
        struct target_place *p = &w->place[i];
        p->query = at;
        at += (size_t)p->n_queries * h;
        for (int l = 0; l < TARGET_N_LABELS; l++) {
            bool has = w->labels >> l & 1;
            p->label[l] = has ? at : NULL;
            if (has) at += p->n;
        }
        p->mark = at;
        p->observed = p->mark + p->n;
        at = p->observed + p->n;
        for (int b = 0; b < p->n; b++) p->observed[b] = NAN;
    }
    return 0;
}

void target_window_free(struct target_window *w) {
    free(w->floats);
    w->floats = NULL;
}

void target_norm(float *x, int n) {
    double mean = 0, square = 0;
    for (int i = 0; i < n; i++) mean += (double)x[i];
    mean /= n;
    for (int i = 0; i < n; i++) square += ((double)x[i] - mean) * ((double)x[i] - mean);
    double inv = 1 / sqrt(square / n + 1e-5);
    for (int i = 0; i < n; i++) x[i] = (float)(((double)x[i] - mean) * inv);
}

void target_window_represent(struct target_window *w, const float *plane, int hidden,
                             bool has_first, bool by_first) {
    size_t h = (size_t)hidden, step = (has_first ? 5 : 4) * h;
    ASSERT(!by_first || has_first);
    for (int b = 0; b < w->n_blocks; b++, plane += step) {
        float *rep = w->rep + (size_t)b * h;
        for (size_t i = 0; i < h; i++) {
            double sum = 0;
            for (size_t q = 0; q < 4; q++) sum += (double)plane[q * h + i];
            rep[i] = by_first ? plane[4 * h + i] : (float)(sum / KERN_BLOCK);
        }
        target_norm(rep, hidden);
        for (size_t q = 0; w->has_quarters && q < 4; q++) {
            float *to = w->quarter + (4 * (size_t)b + q) * h;
            for (size_t i = 0; i < h; i++) to[i] = plane[q * h + i] / KERN_QUARTER;
            target_norm(to, hidden);
        }
    }
}

/* ---- In a file ---- */

struct target_samples {
    FILE *f; /* NULL: nothing is kept */
    char *path;
    int hidden;
    long file_bytes;                   /* when it was opened */
    struct target_samples_content has; /* as the file says */
    bool is_open;                      /* what is wanted is all that it has: more may follow */
    int wanted[MODEL_MAX_TAPS]; /* the place among the layers wanted of each that it has, or -1 */
};

struct file_head {
    char magic[8];
    uint64_t key;
    uint32_t labels;
    int32_t has_quarters, n_queries, n_layers, layer[MODEL_MAX_TAPS];
    uint64_t sum; /* of what stands before */
};
struct record_head {
    int32_t layer_idx, domain, source, is_held_out, n_blocks, has_quarters, n_places;
    uint32_t labels;
    struct {
        int32_t n_tokens, n_queries, first, n;
    } place[TARGET_MAX_PLACES];
    uint64_t n_floats, sum; /* sum: of the floats, seeded with the sum of what stands before */
};
static const char magic[8] = "TNDMWIN2";

static uint64_t sum_of(const struct record_head *r, const float *floats) {
    uint64_t head = XXH3_64bits(r, offsetof(struct record_head, sum));
    return XXH3_64bits_withSeed(floats, r->n_floats * sizeof *floats, head);
}

/* Do the counts make sense together? */
static bool check_head(const struct record_head *r) {
    if (r->n_blocks < 1 || r->n_blocks > TARGET_MAX_TRAIN_BLOCKS || r->n_places < 0 ||
        r->n_places > TARGET_MAX_PLACES || r->layer_idx < 0 || r->layer_idx >= MODEL_MAX_TAPS ||
        r->domain < 0 || r->domain >= TARGET_MAX_DOMAINS || r->source < 0 ||
        r->source >= TARGET_MAX_DOMAINS || r->labels >> TARGET_N_LABELS)
        return false;
    for (int i = 0; i < r->n_places; i++)
        if (r->place[i].n_queries < 1 || r->place[i].n_queries > KERN_STATE_QUERIES ||
            r->place[i].first < 0 || r->place[i].n < 0 || r->place[i].first > r->n_blocks ||
            r->place[i].n > r->n_blocks - r->place[i].first || r->place[i].n_tokens < 1 ||
            r->place[i].n_tokens > MODEL_MAX_CONTEXT)
            return false;
    return true;
}

/* The next whole record; *got false at the end or where the rest is torn. One of a layer that
 * nobody wants is passed over, its floats unread. */
static int read_record(struct target_samples *s, struct target_window *w, int *layer_idx, bool *got,
                       struct err *e) {
    struct record_head r;
    *got = false;
    *w = (struct target_window){0};
    if (fread(&r, sizeof r, 1, s->f) != 1 || !check_head(&r) || r.layer_idx >= s->has.n_layers)
        return 0;
    *w = (struct target_window){.domain = r.domain,
                                .source = r.source,
                                .labels = r.labels,
                                .is_held_out = r.is_held_out != 0,
                                .n_blocks = r.n_blocks,
                                .has_quarters = r.has_quarters != 0,
                                .n_places = r.n_places};
    for (int i = 0; i < r.n_places; i++) {
        w->place[i].n_tokens = r.place[i].n_tokens;
        w->place[i].n_queries = r.place[i].n_queries;
        w->place[i].first = r.place[i].first;
        w->place[i].n = r.place[i].n;
    }
    *layer_idx = r.layer_idx;
    if (count_floats(w, (size_t)s->hidden) != r.n_floats) return 0;
    if (s->wanted[r.layer_idx] < 0) {
        long at = ftell(s->f), bytes = (long)(r.n_floats * sizeof *w->floats);
        *got = at >= 0 && bytes <= s->file_bytes - at && fseek(s->f, bytes, SEEK_CUR) == 0;
        return 0;
    }
    int rc = target_window_alloc(w, s->hidden, e);
    if (rc) return rc;
    *got = fread(w->floats, sizeof *w->floats, w->n_floats, s->f) == w->n_floats &&
           sum_of(&r, w->floats) == r.sum;
    if (!*got) target_window_free(w);
    return 0;
}

/* ---- The head ---- */

static int write_head(struct target_samples *s, uint64_t key, struct err *e) {
    struct file_head head;
    memset(&head, 0, sizeof head); /* padding is summed */
    memcpy(head.magic, magic, sizeof magic);
    head.key = key;
    head.labels = s->has.labels;
    head.has_quarters = s->has.has_quarters;
    head.n_queries = s->has.n_queries;
    head.n_layers = s->has.n_layers;
    for (int i = 0; i < s->has.n_layers; i++) head.layer[i] = s->has.layer[i];
    head.sum = XXH3_64bits(&head, offsetof(struct file_head, sum));
    if (fseek(s->f, 0, SEEK_SET) != 0 || ftruncate(fileno(s->f), 0) != 0 ||
        fwrite(&head, sizeof head, 1, s->f) != 1 || fflush(s->f) != 0)
        return err_raise(e, E_IO, "cannot write %s: %s", s->path, strerror(errno));
    return 0;
}

/* *is_new: there is none, or only a part of one. */
static int read_head(struct target_samples *s, uint64_t key, bool *is_new, struct err *e) {
    struct file_head head;
    size_t n = fread(&head, 1, sizeof head, s->f);
    *is_new = n < sizeof head && !memcmp(&head, magic, n < sizeof magic ? n : sizeof magic);
    if (*is_new) return 0;
    if (memcmp(head.magic, magic, sizeof magic) != 0)
        return err_raise(e, E_FORMAT, "%s holds no windows", s->path);
    if (head.sum != XXH3_64bits(&head, offsetof(struct file_head, sum)) || head.n_layers < 1 ||
        head.n_layers > MODEL_MAX_TAPS || head.labels >> TARGET_N_LABELS || head.n_queries < 1 ||
        head.n_queries > KERN_STATE_QUERIES)
        return err_raise(e, E_FORMAT, "%s: its head does not add up", s->path);
    if (head.key != key)
        return err_raise(e, E_INVALID,
                         "%s holds windows of another model, other texts or other options; give "
                         "another --checkpoint",
                         s->path);
    s->has = (struct target_samples_content){.n_layers = head.n_layers,
                                             .labels = head.labels,
                                             .has_quarters = head.has_quarters != 0,
                                             .n_queries = head.n_queries};
    for (int i = 0; i < head.n_layers; i++) s->has.layer[i] = head.layer[i];
    return 0;
}

/* Which of the file's layers are wanted, and is all there that is? */
static int match(struct target_samples *s, const struct target_samples_content *want,
                 struct err *e) {
    int n = 0;
    for (int i = 0; i < s->has.n_layers; i++) {
        s->wanted[i] = -1;
        for (int k = 0; k < want->n_layers; k++)
            if (want->layer[k] == s->has.layer[i]) s->wanted[i] = k;
        n += s->wanted[i] >= 0;
    }
    if (n < want->n_layers || (want->labels & ~s->has.labels) ||
        want->has_quarters > s->has.has_quarters || want->n_queries > s->has.n_queries)
        return err_raise(e, E_INVALID,
                         "%s has %d of the %d layers, %s, up to %d states a place%s: less than "
                         "this training needs (%d states%s); give another --checkpoint",
                         s->path, n, want->n_layers,
                         s->has.has_quarters ? "means of quarters" : "means of blocks alone",
                         s->has.n_queries,
                         want->labels & ~s->has.labels ? ", the label not among its own" : "",
                         want->n_queries, want->has_quarters ? ", quarters" : "");
    s->is_open = n == s->has.n_layers && want->labels == s->has.labels &&
                 want->has_quarters == s->has.has_quarters && want->n_queries == s->has.n_queries;
    return 0;
}

static int read_all(struct target_samples *s, uint64_t key,
                    const struct target_samples_content *want,
                    int (*take)(void *, int, struct target_window *, struct err *), void *arg,
                    int *n_have, struct err *e) {
    bool is_new;
    int rc = read_head(s, key, &is_new, e);
    if (rc) return rc;
    if (is_new) {
        s->is_open = true;
        return write_head(s, key, e);
    }
    rc = match(s, want, e);
    struct stat st;
    if (!rc && fstat(fileno(s->f), &st) != 0)
        rc = err_raise(e, E_IO, "cannot read %s: %s", s->path, strerror(errno));
    if (!rc) s->file_bytes = (long)st.st_size;
    while (!rc) {
        long whole = ftell(s->f);
        struct target_window w[MODEL_MAX_TAPS];
        int layer_idx[MODEL_MAX_TAPS], n = 0;
        bool got = true;
        for (; n < s->has.n_layers && !rc && got; n += !rc && got)
            rc = read_record(s, &w[n], &layer_idx[n], &got, e);
        if (rc || !got) {
            for (int i = 0; i < n; i++) target_window_free(&w[i]);
            if (rc) return rc;
            /* Whatever is behind the last whole group goes. */
            if (whole < 0 || fseek(s->f, whole, SEEK_SET) != 0 ||
                ftruncate(fileno(s->f), whole) != 0)
                return err_raise(e, E_IO, "cannot write %s: %s", s->path, strerror(errno));
            return 0;
        }
        for (int i = 0; i < n; i++) {
            int to = s->wanted[layer_idx[i]];
            if (rc || to < 0) {
                target_window_free(&w[i]);
                continue;
            }
            rc = take(arg, to, &w[i], e);
            if (!rc) ++*n_have;
        }
    }
    return rc;
}

int target_samples_open(struct target_samples **out, const char *path, uint64_t key, int hidden,
                        const struct target_samples_content *content,
                        int (*take)(void *, int, struct target_window *, struct err *), void *arg,
                        int *n_have, struct err *e) {
    struct target_samples *s = calloc(1, sizeof *s);
    int rc = 0;
    *n_have = 0;
    ASSERT(content->n_layers >= 1 && content->n_layers <= MODEL_MAX_TAPS);
    if (!s) return err_raise(e, E_NOMEM, "no memory for %s", path ? path : "samples");
    s->hidden = hidden;
    s->has = *content;
    if (path) {
        s->path = strdup(path);
        if (!s->path) rc = err_raise(e, E_NOMEM, "no memory for %s", path);
        if (!rc) s->f = fopen(path, "r+b");
        if (!rc && !s->f && errno == ENOENT) s->f = fopen(path, "w+b");
        if (!rc && !s->f) rc = err_raise(e, E_IO, "cannot open %s: %s", path, strerror(errno));
        if (!rc) rc = read_all(s, key, content, take, arg, n_have, e);
    }
    if (rc) target_samples_close(s);
    else *out = s;
    return rc;
}

int target_samples_append(struct target_samples *s, int layer_idx, const struct target_window *w,
                          struct err *e) {
    if (!s->f) return 0;
    if (!s->is_open)
        return err_raise(e, E_INVALID,
                         "%s holds more than this training asks for, nothing can follow in it: ask "
                         "for as few --windows as it has, or give the options that it was made by",
                         s->path);
    struct record_head r;
    memset(&r, 0, sizeof r); /* padding is summed */
    r.layer_idx = layer_idx;
    r.domain = w->domain;
    r.source = w->source;
    r.labels = w->labels;
    r.is_held_out = w->is_held_out;
    r.n_blocks = w->n_blocks;
    r.has_quarters = w->has_quarters;
    r.n_places = w->n_places;
    r.n_floats = w->n_floats;
    for (int i = 0; i < w->n_places; i++) {
        r.place[i].n_tokens = w->place[i].n_tokens;
        r.place[i].n_queries = w->place[i].n_queries;
        r.place[i].first = w->place[i].first;
        r.place[i].n = w->place[i].n;
    }
    r.sum = sum_of(&r, w->floats);
    if (fwrite(&r, sizeof r, 1, s->f) != 1 ||
        fwrite(w->floats, sizeof *w->floats, w->n_floats, s->f) != w->n_floats || fflush(s->f) != 0)
        return err_raise(e, E_IO, "cannot write %s: %s", s->path, strerror(errno));
    return 0;
}

void target_samples_close(struct target_samples *s) {
    if (!s) return;
    if (s->f) fclose(s->f);
    free(s->path);
    free(s);
}
