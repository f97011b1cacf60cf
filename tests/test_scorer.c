/* A scorer's file. Goal: what is written comes back, equal content gives equal bytes, and a file
 * that lies is refused by name. Method: files of all kinds through memory and disk; headers edited
 * value by value in a table, each with the words that its error must hold; a good file cut at every
 * byte and with each byte of its header changed; then the scores of a loaded scorer against the
 * weights in memory. */
#include "target/scorer.h"

#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/err.h"
#include "base/file.h"
#include "base/rng.h"
#include "base/strbuf.h"
#include "model/config.h"
#include "tests/fail_alloc.h"
#include "tests/harness.h"
#include "tests/score_bed.h"

enum { HIDDEN = 24 };
static const uint64_t fingerprint = 0x0123456789abcdef;

static struct target_scorer_file shape_of(enum kern_score kind) {
    struct target_scorer_file f = {.kind = kind,
                                   .layer = 6,
                                   .hidden = HIDDEN,
                                   .n_queries = 32,
                                   .normed = true,
                                   .block = 64,
                                   .smoothing = 0.1,
                                   .fingerprint = fingerprint,
                                   .recipe = "seed 7, \"quotes\" and a \\"};
    if (kind == KERN_SCORE_LATE) f.n_heads = 3, f.head_dim = 5;
    if (kind == KERN_SCORE_MLP) f.width = 7, f.has_layernorm = true, f.by_first = true;
    f.curve.n = 2;
    f.curve.at[0].tokens = 2048, f.curve.at[0].keep = 1;
    f.curve.at[1].tokens = 8192, f.curve.at[1].keep = 1.0 / 3;
    return f;
}

/* The weights that a scorer has, one after another. */
static size_t weights(const struct target_scorer_file *f, float *at[8], size_t n[8]) {
    const size_t h = (size_t)f->hidden, w = (size_t)f->width;
    const size_t p = (size_t)f->n_heads * (size_t)f->head_dim * h;
    float *const all[8] = {f->a, f->b, f->ln_weight, f->ln_bias, f->w1, f->b1, f->w2, f->b2};
    const size_t sizes[8] = {p, p, 2 * h, 2 * h, w * 2 * h, w, w, 1};
    size_t total = 0;
    for (int i = 0; i < 8; i++) {
        at[i] = all[i];
        n[i] = all[i] ? sizes[i] : 0;
        total += n[i];
    }
    return total;
}

static struct target_scorer_file *filled(const struct target_scorer_file *shape) {
    struct target_scorer_file *f;
    struct err e = {0};
    float *at[8];
    size_t n[8];
    assert_ok(target_scorer_make(&f, shape, &e), e);
    weights(f, at, n);
    for (int i = 0; i < 8; i++)
        for (size_t k = 0; k < n[i]; k++) {
            assert_true(at[i][k] == 0);
            at[i][k] = rng_uniform(3, (uint64_t)i * 100000 + k, RNG_TEST, 0) - 0.5f;
        }
    return f;
}

static const char *folder(void) {
    static char name[] = "/tmp/tandem-scorer-XXXXXX";
    static bool made;
    if (!made) assert_non_null(mkdtemp(name));
    made = true;
    return name;
}
static const char *path_of(const char *name) {
    static char path[300];
    snprintf(path, sizeof path, "%s/%s", folder(), name);
    return path;
}
/* Nothing but the files that a test names may be left. */
static int n_entries(void) {
    int n = 0;
    DIR *d = opendir(folder());
    assert_non_null(d);
    while (readdir(d)) n++;
    closedir(d);
    return n - 2;
}

static struct file bytes_of(const struct target_scorer_file *f) {
    struct file file;
    struct err e = {0};
    const char *path = path_of("scorer.safetensors");
    assert_ok(target_scorer_write(path, f, &e), e);
    assert_ok(file_read(&file, path, 0, &e), e);
    assert_int_equal(n_entries(), 1);
    assert_int_equal(unlink(path), 0);
    return file;
}
static void leave(void) {
    rmdir(folder());
}

static void assert_same(const struct target_scorer_file *a, const struct target_scorer_file *b) {
    float *x[8], *y[8];
    size_t n[8], m[8];
    assert_int_equal(a->kind, b->kind);
    assert_int_equal(a->layer, b->layer);
    assert_int_equal(a->hidden, b->hidden);
    assert_int_equal(a->n_heads, b->n_heads);
    assert_int_equal(a->head_dim, b->head_dim);
    assert_int_equal(a->width, b->width);
    assert_int_equal(a->n_queries, b->n_queries);
    assert_int_equal(a->normed, b->normed);
    assert_int_equal(a->by_first, b->by_first);
    assert_int_equal(a->has_layernorm, b->has_layernorm);
    assert_int_equal(a->block, b->block);
    assert_true(a->smoothing == b->smoothing && a->fingerprint == b->fingerprint);
    assert_int_equal(a->curve.n, b->curve.n);
    for (int i = 0; i < a->curve.n; i++)
        assert_true(a->curve.at[i].tokens == b->curve.at[i].tokens &&
                    a->curve.at[i].keep == b->curve.at[i].keep);
    assert_string_equal(a->recipe, b->recipe);
    weights(a, x, n);
    weights(b, y, m);
    for (int i = 0; i < 8; i++) {
        assert_int_equal(n[i], m[i]);
        if (n[i]) assert_memory_equal(x[i], y[i], n[i] * 4);
    }
}

static void test_scorer_round_trip(void) {
    for (int kind = 0; kind <= KERN_SCORE_MLP; kind++)
        for (int plain = 0; plain < 2; plain++) {
            struct target_scorer_file shape = shape_of((enum kern_score)kind), *f, *back;
            struct err e = {0};
            if (plain) {
                shape.has_layernorm = shape.by_first = shape.normed = false;
                shape.curve.n = 0;
                shape.recipe[0] = 0;
                shape.smoothing = 0;
            }
            f = filled(&shape);
            struct file first = bytes_of(f);
            assert_ok(target_scorer_read_bytes(&back, first.data, first.bytes, &e), e);
            assert_same(back, f);
            struct file second = bytes_of(back);
            assert_int_equal(first.bytes, second.bytes);
            assert_memory_equal(first.data, second.data, first.bytes);
            file_close(&first), file_close(&second);
            target_scorer_free(f), target_scorer_free(back);
        }
    leave();
}

/* ---- Lies ---- */

static const struct lie {
    enum kern_score kind;
    const char *from, *to, *text; /* in the header; NULL `text`: it is still good */
} lies[] = {
    {KERN_SCORE_LATE, "\"tandem.scorer.version\":\"1\"", "\"tandem.scorer.version\":\"2\"",
     "version is \"2\", we read 1"},
    {KERN_SCORE_LATE, "version", "virsion", "the key tandem.scorer.virsion is unknown"},
    {KERN_SCORE_LATE, "tandem.scorer.version", "tundem.scorer.version",
     "the key tandem.scorer.version is missing"},
    {KERN_SCORE_LATE, "tandem.scorer.fingerprint", "tundem.scorer.fingerprint",
     "the key tandem.scorer.fingerprint is missing"},
    {KERN_SCORE_LATE, "tandem.scorer.recipe", "another.key", NULL},
    {KERN_SCORE_LATE, "\"late\"", "\"soon\"", "kind is \"soon\": mean, late or mlp"},
    {KERN_SCORE_LATE, "\"late\"", "\"mlp\"", "heads is 3, it must be 0 here"},
    {KERN_SCORE_LATE, "layer\":\"6\"", "layer\":\"0\"", "layer is 0, allowed is [1, 255]"},
    {KERN_SCORE_LATE, "layer\":\"6\"", "layer\":\"-6\"", "layer is \"-6\", not a whole number"},
    {KERN_SCORE_LATE, "layer\":\"6\"", "layer\":\"6.5\"", "layer is \"6.5\", not a whole number"},
    {KERN_SCORE_LATE, "layer\":\"6\"", "layer\":\"99999999999999999999\"", "not a whole number"},
    {KERN_SCORE_LATE, "layer\":\"6\"", "layer\":\"\"", "layer is \"\", not a whole number"},
    {KERN_SCORE_LATE, "layer\":\"6\"", "layer\":6", "tandem.scorer.layer is no string"},
    {KERN_SCORE_LATE, "hidden\":\"24\"", "hidden\":\"25\"",
     "tensor a.weight has 2 dimensions, 15 x 24, the metadata ask for 2, 15 x 25"},
    {KERN_SCORE_LATE, "hidden\":\"24\"", "hidden\":\"70000\"", "hidden is 70000, allowed"},
    {KERN_SCORE_LATE, "heads\":\"3\"", "heads\":\"65\"", "heads is 65, allowed is [1, 64]"},
    {KERN_SCORE_LATE, "heads\":\"3\"", "heads\":\"0\"", "heads is 0, allowed is [1, 64]"},
    {KERN_SCORE_LATE, "head_dim\":\"5\"", "head_dim\":\"4\"",
     "15 x 24, the metadata ask for 2, 12"},
    {KERN_SCORE_LATE, "head_dim\":\"5\"", "head_dim\":\"5000\"", "head_dim is 5000, allowed"},
    {KERN_SCORE_LATE, "queries\":\"32\"", "queries\":\"33\"", "queries is 33, allowed is [1, 32]"},
    {KERN_SCORE_LATE, "queries\":\"32\"", "queries\":\"0\"", "queries is 0, allowed is [1, 32]"},
    {KERN_SCORE_LATE, "normed\":\"true\"", "normed\":\"yes\"", "normed is \"yes\", neither true"},
    {KERN_SCORE_LATE, "by_first\":\"false\"", "by_first\":\"true\"", "by_first is 1, it must be 0"},
    {KERN_SCORE_LATE, "block\":\"64\"", "block\":\"0\"", "block is 0, allowed"},
    {KERN_SCORE_LATE, "smoothing\":\"0.10000000000000001\"", "smoothing\":\"1.5\"",
     "smoothing is 1.5, allowed is [0, 1]"},
    {KERN_SCORE_LATE, "smoothing\":\"0.10000000000000001\"", "smoothing\":\"nan\"",
     "smoothing is \"nan\", not a number"},
    {KERN_SCORE_LATE, "fingerprint\":\"0", "fingerprint\":\"G", "not 16 digits"},
    {KERN_SCORE_LATE, "fingerprint\":\"0", "fingerprint\":\"", "not 16 digits"},
    {KERN_SCORE_LATE, "fingerprint\":\"0", "fingerprint\":\"00", "not 16 digits"},
    {KERN_SCORE_LATE, "curve\":\"2048:1,", "curve\":\"9999:1,", "curve is \"9999:1,8192:"},
    {KERN_SCORE_LATE, "curve\":\"2048:1,", "curve\":\"2048:1;", "not 1..8 points"},
    {KERN_SCORE_LATE, "a.weight", "c.weight", "tensor c.weight has no place in a late scorer"},
    {KERN_SCORE_LATE, "\"F32\",\"shape\":[15,24]", "\"I32\",\"shape\":[15,24]",
     "tensor a.weight is of I32, it must be of F32"},
    {KERN_SCORE_LATE, "\"shape\":[15,24]", "\"shape\":[24,15]",
     "tensor a.weight has 2 dimensions, 24 x 15"},
    {KERN_SCORE_LATE, "\"shape\":[15,24]", "\"shape\":[360]",
     "tensor a.weight has 1 dimensions, 360 x 1"},
    {KERN_SCORE_LATE, "\"shape\":[15,24]", "\"shape\":[15,25]", "1440 bytes for 375 values"},
    {KERN_SCORE_MLP, "width\":\"7\"", "width\":\"8\"", "the metadata ask for 2, 8 x 48"},
    {KERN_SCORE_MLP, "width\":\"7\"", "width\":\"65537\"", "width is 65537, allowed"},
    {KERN_SCORE_MLP, "hidden\":\"24\",", "hidden\":\"65536\",\"tandem.scorer.heads\":\"2\",",
     "heads is 2, it must be 0 here"},
    {KERN_SCORE_MLP, "width\":\"7\"", "width\":\"65536\"", "the metadata ask for 2, 65536 x 48"},
    {KERN_SCORE_MLP, "layernorm\":\"true\"", "layernorm\":\"false\"",
     "tensor norm.weight has no place in a mlp scorer"},
    {KERN_SCORE_MEAN, "\"mean\"", "\"late\"", "heads is 0, allowed is [1, 64]"},
};

/* The file with `from` replaced in its header; the caller frees it. */
static uint8_t *edited(const struct file *f, const char *from, const char *to, size_t *n) {
    size_t header = 0;
    for (int i = 0; i < 8; i++) header |= (size_t)f->data[i] << 8 * i;
    const char *text = (const char *)f->data + 8;
    const char *at = memmem(text, header, from, strlen(from));
    if (!at) fail_msg("no %s in the header", from);
    const size_t before = (size_t)(at - text), behind = header - before - strlen(from);
    const size_t length = before + strlen(to) + behind;
    *n = 8 + length + (f->bytes - 8 - header);
    uint8_t *out = malloc(*n), *p = out;
    assert_non_null(out);
    for (int i = 0; i < 8; i++) *p++ = (uint8_t)(length >> 8 * i);
    p = (uint8_t *)memcpy(p, text, before) + before;
    p = (uint8_t *)memcpy(p, to, strlen(to)) + strlen(to);
    memcpy(p, at + strlen(from), f->bytes - 8 - before - strlen(from));
    return out;
}

static void test_scorer_lies(void) {
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        struct target_scorer_file shape = shape_of(lies[i].kind), *f = filled(&shape), *back;
        struct file good = bytes_of(f);
        struct err e = {0};
        size_t n;
        uint8_t *bytes = edited(&good, lies[i].from, lies[i].to, &n);
        int rc = target_scorer_read_bytes(&back, bytes, n, &e);
        if (!lies[i].text) assert_ok(rc, e);
        else if (rc == 0 || back || !strstr(e.message, lies[i].text))
            fail_msg("%s: %d \"%s\", not \"%s\"", lies[i].to, rc, e.message, lies[i].text);
        target_scorer_free(back);
        free(bytes);
        file_close(&good);
        target_scorer_free(f);
    }
    leave();
}

/* Every cut is refused; a header with one byte changed is refused or still within its ranges. */
static void test_scorer_cut_and_changed(void) {
    struct target_scorer_file shape = shape_of(KERN_SCORE_MLP), *f = filled(&shape), *back;
    struct file good = bytes_of(f);
    size_t header = 8, refused = 0;
    for (int i = 0; i < 8; i++) header += (size_t)good.data[i] << 8 * i;
    for (size_t n = 0; n < good.bytes; n++) {
        struct err e = {0};
        uint8_t *cut = malloc(n ? n : 1);
        assert_non_null(cut);
        memcpy(cut, good.data, n);
        if (target_scorer_read_bytes(&back, cut, n, &e) == 0) fail_msg("%zu bytes are read", n);
        assert_true(e.message[0] && !back);
        free(cut);
    }
    for (size_t i = 0; i < header; i++)
        for (int bit = 0; bit < 8; bit++) {
            struct err e = {0};
            uint8_t *other = malloc(good.bytes);
            assert_non_null(other);
            memcpy(other, good.data, good.bytes);
            other[i] ^= (uint8_t)(1 << bit);
            if (target_scorer_read_bytes(&back, other, good.bytes, &e) != 0) {
                assert_true(e.message[0] && !back);
                refused++;
            } else {
                struct target_scorer_file *again; /* its ranges hold */
                assert_ok(target_scorer_make(&again, back, &e), e);
                target_scorer_free(again);
                target_scorer_free(back);
            }
            free(other);
        }
    assert_true(refused > header * 4);
    file_close(&good);
    target_scorer_free(f);
    leave();
}

/* ---- Its model ---- */

static void test_scorer_check(void) {
    struct target_scorer_file shape = shape_of(KERN_SCORE_MLP), *f = filled(&shape);
    struct model_config c = {.n_layers = 30, .hidden = HIDDEN}, other = c;
    struct err e = {0};
    assert_ok(target_scorer_check(f, &c, fingerprint, &e), e);
    assert_int_equal(target_scorer_check(f, &c, 0xfedcba9876543210, &e), E_INVALID);
    assert_non_null(
        strstr(e.message, "fingerprint 0123456789abcdef, this one has fedcba987654321"));
    other.hidden = 25;
    assert_int_equal(target_scorer_check(f, &other, fingerprint, &e), E_INVALID);
    assert_non_null(strstr(e.message, "hidden size of 24, the model has 25"));
    other = c;
    other.n_layers = 6;
    assert_int_equal(target_scorer_check(f, &other, fingerprint, &e), E_INVALID);
    assert_non_null(strstr(e.message, "select layer is 6, the model has layers 0..5"));
    f->block = 32;
    assert_int_equal(target_scorer_check(f, &c, fingerprint, &e), E_INVALID);
    assert_non_null(strstr(e.message, "blocks of 32 tokens, ours are 64"));
    f->block = 64;
    f->width = 0;
    assert_int_equal(target_scorer_check(f, &c, fingerprint, &e), E_RANGE);
    assert_non_null(strstr(e.message, "width is 0, allowed is [1, 65536]"));
    f->width = 7;
    /* A NaN or an infinity in any weight, first and last of each. */
    float *at[8];
    size_t n[8];
    weights(f, at, n);
    for (int i = 0; i < 8; i++)
        for (int last = 0; n[i] && last < 2; last++) {
            float *w = at[i] + (last ? n[i] - 1 : 0), kept = *w;
            char place[40];
            snprintf(place, sizeof place, "at %zu", last ? n[i] - 1 : 0);
            *w = last ? -INFINITY : NAN;
            assert_int_equal(target_scorer_check(f, &c, fingerprint, &e), E_NUMERIC);
            assert_non_null(strstr(e.message, place));
            *w = kept;
        }
    assert_ok(target_scorer_check(f, &c, fingerprint, &e), e);
    target_scorer_free(f);
}

static void test_scorer_paths(void) {
    struct target_scorer_file shape = shape_of(KERN_SCORE_LATE), *f = filled(&shape), *back;
    struct err e = {0};
    assert_int_equal(target_scorer_read(&back, path_of("none"), &e), E_NOT_FOUND);
    assert_non_null(strstr(e.message, "none"));
    assert_int_equal(target_scorer_write(path_of("no/folder"), f, &e), E_IO);
    assert_non_null(strstr(e.message, "no/folder"));
    assert_int_equal(n_entries(), 0);
    /* Renaming over a folder fails, and nothing is left beside it. */
    assert_int_equal(mkdir(path_of("taken"), 0700), 0);
    assert_int_equal(target_scorer_write(path_of("taken"), f, &e), E_IO);
    assert_int_equal(n_entries(), 1);
    assert_int_equal(rmdir(path_of("taken")), 0);
    f->n_queries = 33;
    assert_int_equal(target_scorer_write(path_of("x"), f, &e), E_RANGE);
    assert_int_equal(n_entries(), 0);
    f->n_queries = 32;
    assert_ok(target_scorer_write(path_of("x"), f, &e), e);
    f->layer = 7;
    assert_ok(target_scorer_write(path_of("x"), f, &e), e);
    assert_int_equal(n_entries(), 1);
    assert_ok(target_scorer_read(&back, path_of("x"), &e), e);
    assert_int_equal(back->layer, 7);
    unlink(path_of("x"));
    target_scorer_free(back);
    target_scorer_free(f);
    leave();
}

/* The n-th allocation of reading, loading and writing fails, for every n: E_NOMEM, nothing left. */
static void test_scorer_no_memory(void) {
    struct target_scorer_file shape = shape_of(KERN_SCORE_LATE), *f = filled(&shape), *back;
    struct file good = bytes_of(f);
    struct kern_options o = {.n_threads = 1};
    struct kern *k;
    struct target_scorer *s;
    struct err e = {0};
    assert_ok(kern_cpu_open(&k, &o, &e), e);
    const long live = fail_alloc_live();
    for (int what = 0; what < 3; what++) {
        int rc = E_NOMEM;
        long n = 0;
        while (rc) {
            back = NULL, s = NULL;
            fail_alloc_at(++n);
            if (what == 0) rc = target_scorer_read_bytes(&back, good.data, good.bytes, &e);
            else if (what == 1) rc = target_scorer_load(&s, f, k, &e);
            else rc = target_scorer_write(path_of("x"), f, &e);
            const long failed = fail_alloc_n_failed();
            fail_alloc_at(0);
            if (rc) assert_true(rc == E_NOMEM && failed && !back && !s);
            else assert_int_equal(failed, 0);
            target_scorer_free(back);
            target_scorer_close(s);
            assert_int_equal(fail_alloc_live(), live);
        }
        assert_true(n > 1);
    }
    assert_int_equal(n_entries(), 1);
    unlink(path_of("x"));
    k->ops->close(k);
    file_close(&good);
    target_scorer_free(f);
    leave();
}

/* Scores of the loaded scorer are those of the file's arrays, to the bit. */
static void test_scorer_load(void) {
    struct kern_options o = {.n_threads = 1};
    struct kern *k;
    struct err e = {0};
    assert_ok(kern_cpu_open(&k, &o, &e), e);
    struct score_bed b = score_bed_open(300, HIDDEN, true, 1, 9);
    score_bed_naive_note(&b, 0, b.n_tokens);
    struct kern_score_view v = score_bed_view(&b);
    for (int kind = 0; kind <= KERN_SCORE_MLP; kind++) {
        struct target_scorer_file shape = shape_of((enum kern_score)kind), *f = filled(&shape);
        struct target_scorer *s;
        struct kern_scorer direct = {.kind = f->kind,
                                     .cols = HIDDEN,
                                     .n_queries = 32,
                                     .normed = true,
                                     .by_first = f->by_first,
                                     .n_heads = f->n_heads,
                                     .head_dim = f->head_dim,
                                     .width = f->width,
                                     .a = f->a,
                                     .b = f->b,
                                     .ln_weight = f->ln_weight,
                                     .ln_bias = f->ln_bias,
                                     .w1 = f->w1,
                                     .b1 = f->b1,
                                     .w2 = f->w2,
                                     .b2 = f->b2};
        float want[5], got[5];
        void *scratch = aligned_alloc(64, 1 << 20);
        assert_true(scratch && k->ops->score_scratch_bytes(k, &direct, 5) <= 1 << 20);
        assert_ok(target_scorer_load(&s, f, k, &e), e);
        assert_int_equal(target_scorer_bytes(s), target_scorer_file_bytes(f));
        assert_int_equal(k->ops->score(k, &direct, &v, scratch, want), 0);
        target_scorer_free(f);
        assert_int_equal(k->ops->score(k, target_scorer_kern(s), &v, scratch, got), 0);
        assert_memory_equal(got, want, sizeof want);
        assert_true(isfinite(got[0]) && got[0] != got[1]);
        free(scratch);
        target_scorer_close(s);
    }
    score_bed_close(&b);
    k->ops->close(k);
}

const struct test tests[] = {
    {"scorer_round_trip", TEST_QUICK, 20000, test_scorer_round_trip},
    {"scorer_lies", TEST_QUICK, 20000, test_scorer_lies},
    {"scorer_cut_and_changed", TEST_QUICK, 60000, test_scorer_cut_and_changed},
    {"scorer_check", TEST_QUICK, 20000, test_scorer_check},
    {"scorer_paths", TEST_QUICK, 20000, test_scorer_paths},
    {"scorer_no_memory", TEST_QUICK, 20000, test_scorer_no_memory},
    {"scorer_load", TEST_QUICK, 20000, test_scorer_load},
    {0},
};
