/* A small main for fuzz targets where libFuzzer is not at hand (gcc, sanitizer builds, CI): replays
 * the given files, then runs seeded mutations of them. The same seed gives the same inputs
 * everywhere.
 *
 *   driver [--runs N] [--seed S] [--start K] [--max-bytes B] [--save FILE] files...
 *
 * The work is done in a child that keeps the number of its present run in shared memory, so that a
 * crash, a sanitizer report or a hang (10 s) is told with the run that caused it and its input can
 * be written to FILE. Exit: 0 nothing found, 1 a finding, 2 usage. */
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/err.h"
#include "base/file.h"
#include "base/number.h"
#include "base/rng.h"

extern int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

enum { MAX_SEEDS = 4096, MAX_OPS = 8, HANG_SECONDS = 10 };

struct input {
    uint8_t *data;
    size_t n;
};

struct options {
    uint64_t runs, seed, start;
    size_t max_bytes;
    const char *save;
    struct input seeds[MAX_SEEDS];
    size_t n_seeds;
};

/* Draws of one run, in order. */
struct draws {
    uint64_t seed, run;
    uint32_t used;
};

static uint32_t draw(struct draws *d) {
    return rng_u32(d->seed, d->run, RNG_TEST, d->used++);
}
static size_t draw_below(struct draws *d, size_t n) {
    return n ? draw(d) % n : 0;
}

/* Values that length and sign checks trip over. */
static uint64_t draw_interesting(struct draws *d) {
    static const uint64_t values[] = {0,
                                      1,
                                      2,
                                      3,
                                      4,
                                      7,
                                      8,
                                      15,
                                      16,
                                      31,
                                      32,
                                      63,
                                      64,
                                      127,
                                      128,
                                      255,
                                      256,
                                      4095,
                                      4096,
                                      32767,
                                      32768,
                                      65535,
                                      65536,
                                      0x7fffffff,
                                      0x80000000,
                                      0xffffffff,
                                      0x100000000,
                                      0x7fffffffffffffff,
                                      0x8000000000000000,
                                      0xffffffffffffffff};
    uint64_t v = values[draw_below(d, sizeof values / sizeof *values)];
    return draw(d) % 4 ? v : v + draw(d) % 5 - 2;
}

static void overwrite(struct input *in, size_t at, const void *bytes, size_t n) {
    if (at < in->n) memcpy(in->data + at, bytes, in->n - at < n ? in->n - at : n);
}

/* Insert n bytes at `at`, as far as max_bytes allows. The buffer holds max_bytes. */
static void insert(struct input *in, size_t at, const uint8_t *bytes, size_t n, size_t max_bytes) {
    if (n > max_bytes - in->n) n = max_bytes - in->n;
    memmove(in->data + at + n, in->data + at, in->n - at);
    memcpy(in->data + at, bytes, n);
    in->n += n;
}

static void mutate_once(const struct options *o, struct draws *d, struct input *in) {
    size_t at = draw_below(d, in->n), left = in->n - at;
    uint8_t small[32];
    uint64_t v;
    switch (draw(d) % 10) {
    case 0: /* one bit */
        if (in->n) in->data[at] ^= (uint8_t)(1u << draw(d) % 8);
        break;
    case 1: /* one byte */
        if (in->n) in->data[at] = (uint8_t)draw(d);
        break;
    case 2: /* a little-endian number of 1, 2, 4 or 8 bytes */
    case 3:
        v = draw_interesting(d);
        for (int i = 0; i < 8; i++) small[i] = (uint8_t)(v >> 8 * i);
        overwrite(in, at, small, (size_t)1 << draw(d) % 4);
        break;
    case 4: /* the same, big-endian */
        v = draw_interesting(d);
        for (int i = 0; i < 8; i++) small[i] = (uint8_t)(v >> (56 - 8 * i));
        at &= ~(size_t)3;
        overwrite(in, at, small + 4, 4);
        break;
    case 5: { /* cut a run out */
        size_t n = 1 + draw_below(d, left < 64 ? left : 64);
        if (n > left) n = left;
        memmove(in->data + at, in->data + at + n, left - n);
        in->n -= n;
        break;
    }
    case 6: { /* repeat a run */
        size_t n = left < sizeof small ? left : sizeof small;
        n = n ? 1 + draw_below(d, n) : 0;
        memcpy(small, in->data + at, n);
        for (size_t k = 1 + draw_below(d, 4); k > 0; k--) insert(in, at, small, n, o->max_bytes);
        break;
    }
    case 7: { /* put noise in */
        size_t n = 1 + draw_below(d, sizeof small);
        for (size_t i = 0; i < n; i++) small[i] = (uint8_t)draw(d);
        insert(in, at, small, n, o->max_bytes);
        break;
    }
    case 8: /* end early */
        if (draw(d) % 4 == 0) in->n = at;
        break;
    case 9: { /* a run of another seed over this one */
        const struct input *other = &o->seeds[draw_below(d, o->n_seeds)];
        size_t from = draw_below(d, other->n);
        overwrite(in, at, other->data + from, draw_below(d, other->n - from + 1));
        break;
    }
    }
}

/* The input of run `run`: first the files as they are, then mutations. `in->data` holds max_bytes.
 */
static void make_input(const struct options *o, uint64_t run, struct input *in) {
    struct draws d = {o->seed, run, 0};
    const struct input *from = &o->seeds[run < o->n_seeds ? run : draw_below(&d, o->n_seeds)];
    in->n = from->n;
    memcpy(in->data, from->data, from->n);
    if (run < o->n_seeds) return;
    for (size_t k = 1 + draw_below(&d, MAX_OPS); k > 0; k--) mutate_once(o, &d, in);
}

static void work(const struct options *o, volatile uint64_t *now, struct input *in) {
    for (uint64_t run = o->start; run < o->n_seeds + o->runs; run++) {
        *now = run;
        make_input(o, run, in);
        /* An allocation of exactly n bytes, so that a read behind the end is seen. */
        uint8_t *copy = malloc(in->n ? in->n : 1);
        if (!copy) _exit(3);
        memcpy(copy, in->data, in->n);
        alarm(HANG_SECONDS);
        LLVMFuzzerTestOneInput(copy, in->n);
        alarm(0);
        free(copy);
    }
}

static int usage(const char *why) {
    fprintf(stderr,
            "driver: %s\nusage: driver [--runs N] [--seed S] [--start K] [--max-bytes B] "
            "[--save FILE] files...\n",
            why);
    return 2;
}

static int add_seed(struct options *o, const char *path) {
    struct file f;
    struct err e = {0};
    if (o->n_seeds == MAX_SEEDS) return usage("too many files");
    if (file_read(&f, path, o->max_bytes, &e) != 0) return usage(e.message);
    o->seeds[o->n_seeds].n = f.bytes;
    o->seeds[o->n_seeds++].data = (uint8_t *)(uintptr_t)f.data; /* kept to the end */
    return 0;
}

int main(int argc, char **argv) {
    static struct options o = {.runs = 0, .seed = 1, .max_bytes = 1 << 20};
    for (int i = 1; i < argc; i++) {
        uint64_t v = 0;
        if (strncmp(argv[i], "--", 2) != 0) continue;
        const char *name = argv[i], *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (strcmp(name, "--save") == 0) o.save = value;
        else if (!value || !number_u64(value, strlen(value), 10, &v)) return usage(name);
        else if (strcmp(name, "--runs") == 0) o.runs = v;
        else if (strcmp(name, "--seed") == 0) o.seed = v;
        else if (strcmp(name, "--start") == 0) o.start = v;
        else if (strcmp(name, "--max-bytes") == 0 && v > 0 && v < 1u << 30) o.max_bytes = (size_t)v;
        else return usage(name);
        i++;
    }
    for (int i = 1; i < argc; i++) {
        if (strncmp(argv[i], "--", 2) == 0) i++;
        else if (add_seed(&o, argv[i]) != 0) return 2;
    }
    static uint8_t none;
    if (o.n_seeds == 0) o.seeds[o.n_seeds++] = (struct input){&none, 0};

    volatile uint64_t *now =
        mmap(NULL, sizeof *now, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    struct input in = {malloc(o.max_bytes), 0};
    if (now == MAP_FAILED || !in.data) return usage("out of memory");
    fflush(NULL);
    pid_t pid = fork();
    if (pid < 0) return usage(strerror(errno));
    if (pid == 0) {
        work(&o, now, &in);
        exit(0); /* runs the leak check where there is one */
    }
    int status = 0;
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
    }
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) {
        printf("%llu inputs of seed %llu: nothing found\n",
               (unsigned long long)(o.n_seeds + o.runs - o.start), (unsigned long long)o.seed);
        free(in.data);
        return 0;
    }
    fprintf(stderr, "FOUND at run %llu of seed %llu (%s %d)\n", (unsigned long long)*now,
            (unsigned long long)o.seed, WIFSIGNALED(status) ? "signal" : "exit",
            WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
    make_input(&o, *now, &in);
    FILE *f = o.save ? fopen(o.save, "wb") : NULL;
    if (f) {
        fwrite(in.data, 1, in.n, f);
        fclose(f);
        fprintf(stderr, "input saved in %s\n", o.save);
    }
    free(in.data);
    return 1;
}
