/* Samples of scorers' trainings in a file. Goal: what was written is read, of a file that was cut
 * or changed the whole ones before that, of a file of other contents nothing; trainings that need
 * less read it, too, and cannot add to it. Method: windows of random floats. */
#include "tests/harness.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/err.h"
#include "base/rng.h"
#include "target/train.h"

enum { N_WINDOWS = 10, WIDE = 32, N_BLOCKS = 24 };

static struct target_window windows[N_WINDOWS];

static void make_windows(void) {
    struct err e = {0};
    for (int i = 0; i < N_WINDOWS; i++) {
        struct target_window *w = &windows[i];
        *w = (struct target_window){.n_blocks = N_BLOCKS,
                                    .labels = 1U << TARGET_LABEL_DEEP,
                                    .has_quarters = true,
                                    .is_held_out = i < 2,
                                    .n_places = 4};
        for (int k = 0; k < 4; k++)
            w->place[k] = (struct target_place){
                .n_tokens = 64 * (N_BLOCKS - k), .n_queries = 4, .first = 1, .n = N_BLOCKS - 4};
        assert_ok(target_window_alloc(w, WIDE, &e), e);
        for (size_t x = 0; x < w->n_floats; x++)
            w->floats[x] = (float)rng_uniform(100 + (uint64_t)i, 0, RNG_TEST, (uint32_t)x);
    }
}

static void free_windows(void) {
    for (int i = 0; i < N_WINDOWS; i++) target_window_free(&windows[i]);
}

struct taken {
    int n, layer[8];
    struct target_window w[8];
};
static int take(void *arg, int layer_idx, struct target_window *w, struct err *e) {
    struct taken *t = arg;
    if (t->n == 8) return err_raise(e, E_FULL, "more windows than were written");
    t->layer[t->n] = layer_idx;
    t->w[t->n++] = *w;
    return 0;
}
static void drop(struct taken *t) {
    for (int i = 0; i < t->n; i++) target_window_free(&t->w[i]);
    t->n = 0;
}

static long file_bytes(const char *path) {
    struct stat s;
    assert_int_equal(stat(path, &s), 0);
    return (long)s.st_size;
}

static const struct target_samples_content one = {.n_layers = 1,
                                                  .layer = {3},
                                                  .labels = 1U << TARGET_LABEL_DEEP,
                                                  .has_quarters = true,
                                                  .n_queries = 4};

/* Open the file of key 1, with all that is in it in *got; *n: how many. */
static struct target_samples *open_file(const char *path, struct taken *got, int *n) {
    struct target_samples *s;
    struct err e = {0};
    assert_ok(target_samples_open(&s, path, 1, WIDE, &one, take, got, n, &e), e);
    return s;
}

/* Three windows in `path`; returns the bytes of its head. */
static long write_three(const char *path) {
    struct taken got = {0};
    struct err e = {0};
    int n;
    target_samples_close(open_file(path, &got, &n));
    long head = file_bytes(path);
    struct target_samples *s = open_file(path, &got, &n);
    assert_int_equal(n, 0);
    for (int i = 0; i < 3; i++) assert_ok(target_samples_append(s, 0, &windows[i], &e), e);
    target_samples_close(s);
    return head;
}

static void refused(const char *path, uint64_t key, int code) {
    struct target_samples *s;
    struct taken got = {0};
    struct err e = {0};
    int n;
    assert_int_equal(target_samples_open(&s, path, key, WIDE, &one, take, &got, &n, &e), code);
}

/* bytes[0..n) as the file, a bit of the one at `change` (-1: none) turned. */
static void put_file(const char *path, const char *bytes, long n, long change) {
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, (size_t)n, f), n);
    if (change >= 0) {
        fseek(f, change, SEEK_SET);
        fputc(bytes[change] ^ 64, f);
    }
    fclose(f);
}

static void test_samples_file(void) {
    char path[64];
    struct taken got = {0};
    int n;
    snprintf(path, sizeof path, "/tmp/tandem-windows-%d", (int)getpid());
    make_windows();
    write_three(path);
    refused(path, 2, E_INVALID);
    target_samples_close(open_file(path, &got, &n));
    assert_int_equal(n, 3);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(got.layer[i], 0);
        assert_int_equal(got.w[i].is_held_out, windows[i].is_held_out);
        assert_int_equal(got.w[i].n_floats, windows[i].n_floats);
        assert_memory_equal(got.w[i].floats, windows[i].floats, windows[i].n_floats * 4);
        assert_int_equal(got.w[i].place[3].n_tokens, windows[i].place[3].n_tokens);
    }
    drop(&got);
    unlink(path);
    free_windows();
}

/* Cut anywhere, the whole ones stay and more can follow; a changed one ends the file; a changed
 * head, or that of another file, is refused. */
static void test_samples_torn(void) {
    char path[64];
    struct err e = {0};
    struct taken got = {0};
    int n;
    snprintf(path, sizeof path, "/tmp/tandem-windows-%d", (int)getpid());
    make_windows();
    long head = write_three(path), size = file_bytes(path), record = (size - head) / 3;
    char *bytes = malloc((size_t)size);
    FILE *f = fopen(path, "rb");
    assert_true(f && bytes);
    assert_int_equal(fread(bytes, 1, (size_t)size, f), size);
    fclose(f);
    for (int way = 0; way < 40; way++) {
        long cut = way == 0   ? size - 1
                   : way == 1 ? 15
                              : (long)(rng_u32(8, 0, RNG_TEST, (uint32_t)way) % (uint32_t)size);
        bool change = way >= 20;
        if (change && cut < head) cut += head; /* the head comes below */
        put_file(path, bytes, change ? size : cut, change ? cut : -1);
        int whole = cut < head ? 0 : (int)((cut - head) / record);
        struct target_samples *s = open_file(path, &got, &n);
        assert_int_equal(n, whole);
        drop(&got);
        assert_ok(target_samples_append(s, 0, &windows[9], &e), e);
        target_samples_close(s);
        target_samples_close(open_file(path, &got, &n));
        assert_int_equal(n, whole + 1);
        assert_memory_equal(got.w[whole].floats, windows[9].floats, windows[9].n_floats * 4);
        drop(&got);
    }
    for (long at = 0; at < head; at += 5) {
        put_file(path, bytes, size, at);
        refused(path, 1, E_FORMAT);
    }
    put_file(path, "text", 4, -1);
    refused(path, 1, E_FORMAT);
    free(bytes);
    unlink(path);
    free_windows();
}

/* Trainings that need less than a file has read it: some of its layers, of which each comes as the
 * one that was asked for. They cannot add to it. */
static void test_samples_shared(void) {
    static const struct target_samples_content all = {.n_layers = 3,
                                                      .layer = {2, 5, 9},
                                                      .labels = 1U << TARGET_LABEL_DEEP,
                                                      .has_quarters = true,
                                                      .n_queries = 4};
    struct target_samples_content want;
    struct taken got = {0};
    struct target_samples *s;
    struct err e = {0};
    char path[64];
    int n;
    snprintf(path, sizeof path, "/tmp/tandem-windows-%d", (int)getpid());
    make_windows();
    assert_ok(target_samples_open(&s, path, 1, WIDE, &all, take, &got, &n, &e), e);
    for (int i = 0; i < 6; i++) assert_ok(target_samples_append(s, i % 3, &windows[i], &e), e);
    target_samples_close(s);
    want = all;
    want.n_layers = 2;
    want.layer[0] = 2;
    want.layer[1] = 9;
    assert_ok(target_samples_open(&s, path, 1, WIDE, &want, take, &got, &n, &e), e);
    assert_int_equal(n, 4);
    for (int i = 0; i < 4; i++) {
        const struct target_window *w = &windows[i / 2 * 3 + i % 2 * 2];
        assert_int_equal(got.layer[i], i % 2);
        assert_memory_equal(got.w[i].floats, w->floats, w->n_floats * 4);
    }
    assert_int_equal(target_samples_append(s, 0, &windows[9], &e), E_INVALID);
    target_samples_close(s);
    drop(&got);
    want = all;
    want.has_quarters = false;
    want.n_queries = 1;
    assert_ok(target_samples_open(&s, path, 1, WIDE, &want, take, &got, &n, &e), e);
    assert_int_equal(n, 6);
    target_samples_close(s);
    drop(&got);
    for (int way = 0; way < 3; way++) {
        want = all;
        if (way == 0) want.layer[1] = 6;
        if (way == 1) want.labels |= 1U << TARGET_LABEL_LAST;
        if (way == 2) want.n_queries = 5;
        assert_int_equal(target_samples_open(&s, path, 1, WIDE, &want, take, &got, &n, &e),
                         E_INVALID);
    }
    unlink(path);
    free_windows();
}

const struct test tests[] = {
    {"samples_file", TEST_QUICK, 60000, test_samples_file},
    {"samples_torn", TEST_QUICK, 60000, test_samples_torn},
    {"samples_shared", TEST_QUICK, 60000, test_samples_shared},
    {0},
};
