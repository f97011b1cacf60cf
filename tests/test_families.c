/* Every family that we read, against transformers: tests/golden/families/ holds tiny random models
 * and the logits that transformers computes with them (make_families.py says how they are made, and
 * compares the GGUF files with what llama.cpp's converter makes of the folders).
 *
 * Reference path: every logit of every position within 1e-4, for prompt rows and generated rows,
 * from the folder and from the GGUF file. What is left is rounding: transformers has the angles of
 * the rotation in f32 where ours are exact (that moves its own logits by 1e-5 to 8e-5), and we keep
 * f32 between operations (transformers all in f32 is 2e-5 to 1.7e-4 away from these logits).
 *
 * Then the same models with one thing wrong each (rope base, a scaling left out or misread,
 * epsilon, norms swapped or in the wrong place, a bias gone, a tied head, a NoPE layer rotated,
 * halves taken for neighbours): each must miss by 100 times the tolerance, or the test could not
 * see it.
 *
 * Fast path, on every instruction set that runs here: quantised activations do not apply to these
 * F32, F16 and BF16 weights, so what is rounded is K and V (f16) and, by AMX, the operands of
 * prompt rows (bf16). The yardstick is the KL of transformers itself when it computes in bf16: AMX
 * may not have more; f16 is 8 times finer and KL goes with the square, so the others may have 1/64
 * of it. */
#include "tests/harness.h"

#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>

#include "base/err.h"
#include "base/file.h"
#include "model/gguf.h"
#include "model/model_private.h"
#include "tests/runner.h"

#define TOLERANCE 1e-4
#define SEEN (100 * TOLERANCE)

enum { MAX_PATH = 256, MAX_IDS = 192 };

static const struct family {
    const char *name;
    bool gguf; /* <name>.gguf too */
} families[] = {
    {"llama2", false},  {"llama3", true},  {"mistral", true}, {"qwen2", true}, {"qwen3", true},
    {"smollm2", false}, {"smollm3", true}, {"linear", true},  {"yarn", true},
};
enum { N_FAMILIES = sizeof families / sizeof *families };

/* ---- Goldens ---- */

struct golden {
    int n_ids, vocab, n_wrong;
    float bf16_kl; /* mean KL of transformers in bf16 */
    const int32_t *ids;
    const float *logits; /* [n_ids][vocab] */
    const float *wrong;  /* [n_wrong][vocab]: the last rows, Q and K normed after the rotation */
    struct file file;
};

static void load_golden(struct golden *g, const char *family) {
    char name[64];
    struct err e = {0};
    int32_t head[3];
    snprintf(name, sizeof name, "families/%s.logits", family);
    assert_ok(file_read(&g->file, test_golden(name), 1 << 20, &e), e);
    const uint8_t *p = g->file.data;
    assert_true(g->file.bytes > 20 && memcmp(p, "TFAM", 4) == 0);
    memcpy(head, p + 4, sizeof head);
    memcpy(&g->bf16_kl, p + 16, 4);
    g->n_ids = head[0];
    g->vocab = head[1];
    g->n_wrong = head[2];
    assert_in_range(g->n_ids, 1, MAX_IDS);
    size_t vocab = (size_t)g->vocab;
    g->ids = (const int32_t *)(const void *)(p + 20);
    g->logits = (const float *)(const void *)(g->ids + g->n_ids);
    g->wrong = g->logits + (size_t)g->n_ids * vocab;
    const uint8_t *end = (const uint8_t *)(g->wrong + (size_t)g->n_wrong * vocab);
    assert_int_equal(end - p, g->file.bytes);
}

/* Largest difference; infinite where one is NaN. */
static double worst(const float *a, const float *b, size_t n) {
    double out = 0;
    for (size_t i = 0; i < n; i++) {
        double d = fabs((double)a[i] - (double)b[i]);
        if (!(d <= out)) out = d == d ? d : INFINITY;
    }
    return out;
}

static double worst_of(const struct golden *g, const float *z) {
    return worst(z, g->logits, (size_t)g->n_ids * (size_t)g->vocab);
}

/* Mean KL(golden || softmax(z)) over all positions. */
static double mean_kl(const struct golden *g, const float *z) {
    double out = 0;
    for (int r = 0; r < g->n_ids; r++) {
        const float *p = g->logits + (size_t)r * (size_t)g->vocab, *q = z + (p - g->logits);
        double sum_p = 0, sum_q = 0, d = 0;
        for (int i = 0; i < g->vocab; i++) {
            sum_p += exp((double)p[i]);
            sum_q += exp((double)q[i]);
        }
        for (int i = 0; i < g->vocab; i++)
            d +=
                exp((double)p[i]) / sum_p * ((double)p[i] - log(sum_p) - (double)q[i] + log(sum_q));
        out += d / g->n_ids;
    }
    return out;
}

/* ---- Running ---- */

struct way {
    enum kern_precision precision;
    const char *isa;
    bool prompt; /* class of all rows */
    int chunk;
    int select_layer;
};

/* Pieces that are no multiple of a page, and one that is. */
static const struct way reference_prompt = {KERN_REFERENCE, NULL, true, 50, 0};
static const struct way reference_generated = {KERN_REFERENCE, NULL, false, 4, 1};

/* A matrix names the one whose product follows it in a pass; behind the head, the next pass. */
static void check_chain(const struct model *m) {
    const struct kern_weight *at = m->head.next;
    for (int i = 0; i < m->config.n_layers; i++) {
        const struct model_layer *l = &m->layers[i];
        const struct model_linear *of[] = {&l->qkv, &l->o, &l->gate_up, &l->down};
        for (int k = 0; k < 4; k++)
            for (int part = 0; part < of[k]->n_parts; part++, at = at->next)
                assert_ptr_equal(at, &of[k]->part[part]);
    }
    assert_ptr_equal(at, &m->head);
}

/* [n_ids][vocab], the caller's. */
static float *logits_of(const char *path, const struct golden *g, struct way w) {
    struct runner_options o = {.path = path,
                               .precision = w.precision,
                               .isa = w.isa,
                               .n_threads = 2,
                               .max_tokens = MAX_IDS,
                               .n_seqs = 1,
                               .max_rows = 64,
                               .kv = w.precision == KERN_REFERENCE ? KERN_F32 : KERN_F16,
                               .select_layer = w.select_layer};
    struct runner *r = runner_open(&o);
    assert_int_equal(runner_config(r)->vocab, g->vocab);
    check_chain(runner_model(r));
    float *z = malloc((size_t)g->n_ids * (size_t)g->vocab * sizeof *z);
    assert_non_null(z);
    for (int at = 0; at < g->n_ids; at += w.chunk) {
        int n = g->n_ids - at < w.chunk ? g->n_ids - at : w.chunk;
        struct runner_piece p = {.ids = g->ids + at, .n = n, .prompt = w.prompt};
        runner_pass(r, &p, 1, z + (size_t)at * (size_t)g->vocab);
    }
    runner_close(r);
    return z;
}

static const char *family_path(const char *family, bool gguf) {
    char name[64];
    snprintf(name, sizeof name, "families/%s%s", family, gguf ? ".gguf" : "");
    return test_golden(name);
}

static double difference(const char *path, const struct golden *g, struct way w) {
    float *z = logits_of(path, g, w);
    double d = worst_of(g, z);
    free(z);
    return d;
}

static void test_families_reference(void) {
    for (int i = 0; i < N_FAMILIES; i++)
        for (int gguf = 0; gguf <= families[i].gguf; gguf++) {
            struct golden g = {0};
            load_golden(&g, families[i].name);
            const char *path = family_path(families[i].name, gguf);
            double prompt = difference(path, &g, reference_prompt);
            double generated = difference(path, &g, reference_generated);
            fprintf(stderr, "  %-8s %s: largest difference %.1e prompt rows, %.1e generated\n",
                    families[i].name, gguf ? "GGUF  " : "folder", prompt, generated);
            assert_near(prompt, 0, TOLERANCE);
            assert_near(generated, 0, TOLERANCE);
            file_close(&g.file);
        }
}

/* The same weights and config from both formats: nothing but the order of a head's dimensions, and
 * with it of sums in double, may differ. */
static void test_families_formats_agree(void) {
    for (int i = 0; i < N_FAMILIES; i++) {
        if (!families[i].gguf) continue;
        struct golden g = {0};
        load_golden(&g, families[i].name);
        float *a = logits_of(family_path(families[i].name, false), &g, reference_prompt);
        float *b = logits_of(family_path(families[i].name, true), &g, reference_prompt);
        double d = worst(a, b, (size_t)g.n_ids * (size_t)g.vocab);
        fprintf(stderr, "  %-8s folder and GGUF: largest difference %.1e\n", families[i].name, d);
        assert_near(d, 0, TOLERANCE / 4);
        free(a);
        free(b);
        file_close(&g.file);
    }
}

/* ---- One thing wrong ---- */

static char folder[64];

static const char *in_folder(const char *name) {
    static char path[MAX_PATH];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void write_file(const char *name, const void *data, size_t n) {
    FILE *f = fopen(in_folder(name), "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

static void copy_in(const char *from, const char *name) {
    struct file f = {0};
    struct err e = {0};
    assert_ok(file_read(&f, from, 1 << 20, &e), e);
    write_file(name, f.data, f.bytes);
    file_close(&f);
}

/* A fresh folder with a copy of the family's files (gguf: of that file, as x.gguf). */
static void make_copy(const char *family, bool gguf) {
    char from[MAX_PATH], path[2 * MAX_PATH];
    snprintf(folder, sizeof folder, "/tmp/tandem_test_fam_XXXXXX");
    assert_non_null(mkdtemp(folder));
    snprintf(from, sizeof from, "%s", family_path(family, gguf));
    if (gguf) {
        copy_in(from, "x.gguf");
        return;
    }
    DIR *d = opendir(from);
    assert_non_null(d);
    for (struct dirent *it; (it = readdir(d));) {
        if (it->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "%s/%s", from, it->d_name);
        copy_in(path, it->d_name);
    }
    closedir(d);
}

static void remove_copy(void) {
    DIR *d = opendir(folder);
    assert_non_null(d);
    for (struct dirent *it; (it = readdir(d));)
        if (it->d_name[0] != '.') assert_int_equal(unlink(in_folder(it->d_name)), 0);
    closedir(d);
    assert_int_equal(rmdir(folder), 0);
}

/* Keys of `text`, a JSON object, take the place of the config's; null stands for absent. */
static void change_config(const char *text) {
    json_error_t je;
    json_t *config = json_load_file(in_folder("config.json"), 0, &je);
    json_t *change = json_loads(text, 0, &je);
    if (!config || !change) fail_msg("%s: %s", text, je.text);
    const char *key;
    json_t *value;
    json_object_foreach(change, key, value) /* a change that changes nothing proves nothing */
        if (json_equal(json_object_get(config, key), value)) fail_msg("%s is there already", text);
    assert_int_equal(json_object_update(config, change), 0);
    assert_int_equal(json_dump_file(config, in_folder("config.json"), 0), 0);
    json_decref(config);
    json_decref(change);
}

/* Where `name` lies in the bytes of a safetensors file. */
static size_t find_tensor(const uint8_t *data, size_t n, const char *name, size_t *bytes,
                          size_t *rows) {
    uint64_t header;
    json_error_t je;
    memcpy(&header, data, 8);
    assert_true(header < n - 8);
    json_t *root = json_loadb((const char *)data + 8, (size_t)header, 0, &je);
    json_t *t = json_object_get(root, name), *offsets = json_object_get(t, "data_offsets");
    if (!offsets) fail_msg("no tensor %s", name);
    size_t begin = (size_t)json_integer_value(json_array_get(offsets, 0));
    *bytes = (size_t)json_integer_value(json_array_get(offsets, 1)) - begin;
    *rows = (size_t)json_integer_value(json_array_get(json_object_get(t, "shape"), 0));
    json_decref(root);
    assert_true(8 + header + begin + *bytes <= n);
    return 8 + (size_t)header + begin;
}

enum op {
    CONFIG, /* change_config(a) */
    ZERO,   /* tensor a */
    SWAP,   /* tensors a and b */
    UNPAIR, /* rows of each of `n` heads of tensor a: neighbours become halves */
    GGUF_NO_ROPE_FREQS,
    GGUF_FLOAT, /* key a gets the value n */
};

static void unpair(uint8_t *w, size_t bytes, size_t rows, int n_heads) {
    size_t dim = rows / (size_t)n_heads, row = bytes / rows;
    uint8_t *old = malloc(bytes);
    assert_non_null(old);
    memcpy(old, w, bytes);
    for (size_t i = 0; i < rows; i++) {
        size_t head = i / dim, k = i % dim, from = k < dim / 2 ? 2 * k : 2 * (k - dim / 2) + 1;
        memcpy(w + i * row, old + (head * dim + from) * row, row);
    }
    free(old);
}

static void change_tensor(enum op op, const char *a, const char *b, int n) {
    struct file f = {0};
    struct err e = {0};
    assert_ok(file_read(&f, in_folder("model.safetensors"), 1 << 20, &e), e);
    uint8_t *data = malloc(f.bytes);
    assert_non_null(data);
    memcpy(data, f.data, f.bytes);
    size_t bytes, rows, at = find_tensor(data, f.bytes, a, &bytes, &rows);
    if (op == ZERO) memset(data + at, 0, bytes);
    if (op == UNPAIR) unpair(data + at, bytes, rows, n);
    if (op == SWAP) {
        size_t bytes_b, rows_b, at_b = find_tensor(data, f.bytes, b, &bytes_b, &rows_b);
        assert_int_equal(bytes, bytes_b);
        memcpy(data + at, f.data + at_b, bytes);
        memcpy(data + at_b, f.data + at, bytes);
    }
    assert_true(memcmp(data, f.data, f.bytes) != 0);
    write_file("model.safetensors", data, f.bytes);
    free(data);
    file_close(&f);
}

static void change_gguf(enum op op, const char *key, int n) {
    struct gguf *g;
    struct err e = {0};
    assert_ok(gguf_open(&g, in_folder("x.gguf"), &e), e);
    const struct file *f = gguf_file(g);
    uint8_t *data = malloc(f->bytes);
    assert_non_null(data);
    memcpy(data, f->data, f->bytes);
    if (op == GGUF_NO_ROPE_FREQS) {
        const struct gguf_tensor *t = gguf_tensor_find(g, "rope_freqs.weight");
        assert_non_null(t);
        const float one = 1;
        for (size_t i = 0; i < t->bytes; i += 4) memcpy(data + (t->data - f->data) + i, &one, 4);
    } else {
        const uint8_t *at = memmem(f->data, f->bytes, key, strlen(key));
        assert_non_null(at); /* then a u32 type and the value */
        const float value = (float)n;
        memcpy(data + (at - f->data) + strlen(key) + 4, &value, 4);
    }
    assert_true(memcmp(data, f->data, f->bytes) != 0);
    size_t bytes = f->bytes;
    gguf_close(g);
    write_file("x.gguf", data, bytes);
    free(data);
}

#define LAYER0(x) "model.layers.0." x ".weight"
#define BIAS0(x) "model.layers.0.self_attn." x "_proj.bias"

static const struct mutation {
    const char *family, *what;
    enum op op;
    const char *a, *b;
    int n;
    bool small; /* too small a mistake for the fast path's bound */
} mutations[] = {
    /* rope base */
    {"llama2", "another rope base than the default", CONFIG, "{\"rope_theta\": 20000}", NULL, 0,
     false},
    {"llama3", "the default rope base", CONFIG, "{\"rope_theta\": null}", NULL, 0, false},
    {"mistral", "the default rope base", CONFIG, "{\"rope_theta\": null}", NULL, 0, false},
    {"qwen2", "the default rope base", CONFIG, "{\"rope_theta\": null}", NULL, 0, false},
    {"qwen3", "the default rope base", CONFIG, "{\"rope_theta\": null}", NULL, 0, false},
    {"smollm2", "the default rope base", CONFIG, "{\"rope_theta\": null}", NULL, 0, false},
    {"smollm3", "the default rope base", CONFIG, "{\"rope_theta\": null}", NULL, 0, false},
    {"qwen3", "another rope base in the GGUF", GGUF_FLOAT, "qwen3.rope.freq_base", NULL, 500000,
     false},
    /* rope scaling */
    {"llama3", "no scaling", CONFIG, "{\"rope_scaling\": null}", NULL, 0, false},
    {"llama3", "half the factor", CONFIG,
     "{\"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 4.0, \"low_freq_factor\": 1.0,"
     " \"high_freq_factor\": 4.0, \"original_max_position_embeddings\": 64}}",
     NULL, 0, false},
    {"llama3", "linear scaling", CONFIG,
     "{\"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 8.0}}", NULL, 0, false},
    {"llama3", "another end of the blend", CONFIG,
     "{\"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8.0, \"low_freq_factor\": 1.0,"
     " \"high_freq_factor\": 3.0, \"original_max_position_embeddings\": 64}}",
     NULL, 0, false},
    {"llama3", "rope_freqs.weight ignored", GGUF_NO_ROPE_FREQS, NULL, NULL, 0, false},
    {"linear", "no scaling", CONFIG,
     "{\"rope_parameters\": {\"rope_type\": \"default\", \"rope_theta\": 10000.0},"
     " \"max_position_embeddings\": 256}",
     NULL, 0, false},
    {"linear", "another factor in the GGUF", GGUF_FLOAT, "llama.rope.scaling.factor", NULL, 3,
     false},
    {"yarn", "no scaling", CONFIG, "{\"rope_scaling\": null}", NULL, 0, false},
    {"yarn", "linear scaling", CONFIG,
     "{\"rope_scaling\": {\"type\": \"linear\", \"factor\": 4.0}}", NULL, 0, false},
    {"yarn", "no attention factor", CONFIG,
     "{\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4.0, \"attention_factor\": 1.0,"
     " \"original_max_position_embeddings\": 64}}",
     NULL, 0, false},
    {"yarn", "another original context", CONFIG,
     "{\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4.0,"
     " \"original_max_position_embeddings\": 128}}",
     NULL, 0, false},
    {"yarn", "another factor in the GGUF", GGUF_FLOAT, "qwen2.rope.scaling.factor", NULL, 3, false},
    /* pairs */
    {"llama2", "rows of Q and K paired wrongly", UNPAIR, LAYER0("self_attn.q_proj"),
     LAYER0("self_attn.k_proj"), 4, false},
    {"smollm3", "a NoPE layer with rope", CONFIG, "{\"no_rope_layers\": [1, 1, 1, 1]}", NULL, 0,
     false},
    {"smollm3", "another layer without rope", CONFIG, "{\"no_rope_layers\": [1, 1, 0, 1]}", NULL, 0,
     false},
    /* norms */
    {"llama2", "another epsilon", CONFIG, "{\"rms_norm_eps\": 1e-6}", NULL, 0, true},
    {"smollm2", "another epsilon", CONFIG, "{\"rms_norm_eps\": 1e-6}", NULL, 0, true},
    {"llama2", "norms of a layer swapped", SWAP, LAYER0("input_layernorm"),
     LAYER0("post_attention_layernorm"), 0, false},
    {"qwen3", "norms of Q and K swapped", SWAP, LAYER0("self_attn.q_norm"),
     LAYER0("self_attn.k_norm"), 0, false},
    /* biases */
    {"qwen2", "no bias on Q", ZERO, BIAS0("q"), NULL, 0, false},
    {"qwen2", "no bias on K", ZERO, BIAS0("k"), NULL, 0, false},
    {"qwen2", "no bias on V", ZERO, BIAS0("v"), NULL, 0, false},
    /* head */
    {"llama2", "the head tied", CONFIG, "{\"tie_word_embeddings\": true}", NULL, 0, false},
    {"mistral", "gate and up swapped", SWAP, LAYER0("mlp.gate_proj"), LAYER0("mlp.up_proj"), 0,
     false},
};

static bool in_gguf(const struct mutation *m) {
    return m->op == GGUF_NO_ROPE_FREQS || m->op == GGUF_FLOAT;
}

static void change(const struct mutation *m) {
    if (in_gguf(m)) change_gguf(m->op, m->a, m->n);
    else if (m->op == CONFIG) change_config(m->a);
    else change_tensor(m->op, m->a, m->b, m->n);
    if (m->op == UNPAIR) change_tensor(m->op, m->b, NULL, m->n);
}

static void test_families_mistakes_show(void) {
    for (size_t i = 0; i < sizeof mutations / sizeof *mutations; i++) {
        const struct mutation *m = &mutations[i];
        char path[MAX_PATH];
        struct golden g = {0};
        load_golden(&g, m->family);
        make_copy(m->family, in_gguf(m));
        snprintf(path, sizeof path, "%s", in_gguf(m) ? in_folder("x.gguf") : folder);
        double before = difference(path, &g, reference_prompt);
        assert_near(before, 0, TOLERANCE); /* the copy itself is right */
        change(m);
        float *z = logits_of(path, &g, reference_prompt);
        double d = worst_of(&g, z), kl = mean_kl(&g, z);
        fprintf(stderr, "  %-8s %-36s missed by %.2g, mean KL %.1e\n", m->family, m->what, d, kl);
        if (!(d >= SEEN)) fail_msg("%s, %s: missed by only %.2e", m->family, m->what, d);
        if (!(kl >= 2 * (double)g.bf16_kl) && !m->small)
            fail_msg("%s, %s: KL %.2e would pass on the fast path", m->family, m->what, kl);
        free(z);
        remove_copy();
        file_close(&g.file);
    }
}

/* Norm order proper: transformers itself with Qwen3's Q and K normed after the rotation. */
static void test_families_norm_order_shows(void) {
    struct golden g = {0};
    load_golden(&g, "qwen3");
    assert_true(g.n_wrong > 0);
    float *z = logits_of(family_path("qwen3", false), &g, reference_prompt);
    size_t n = (size_t)g.n_wrong * (size_t)g.vocab;
    const float *last = z + (size_t)(g.n_ids - g.n_wrong) * (size_t)g.vocab;
    double d = worst(last, g.wrong, n);
    fprintf(stderr, "  qwen3, norms after the rotation: %.2g away from ours\n", d);
    assert_true(d >= SEEN);
    free(z);
    file_close(&g.file);
}

/* ---- Fast path ---- */

static bool isa_runs(const char *isa) {
    struct kern *k;
    struct kern_options o = {.n_threads = 1, .precision = KERN_FAST, .isa = isa};
    if (kern_cpu_open(&k, &o, NULL) != 0) return false;
    k->ops->close(k);
    return true;
}

static void check_fast(const char *isa, bool prompt) {
    double most = 0, ratio = 0;
    for (int i = 0; i < N_FAMILIES; i++) {
        struct golden g = {0};
        load_golden(&g, families[i].name);
        struct way w = {KERN_FAST, isa, prompt, prompt ? 50 : 4, 0};
        float *z = logits_of(family_path(families[i].name, families[i].gguf), &g, w);
        bool bf16 = prompt && strcmp(isa, "amx") == 0;
        double kl = mean_kl(&g, z), bound = (double)g.bf16_kl / (bf16 ? 1 : 64);
        if (!(kl <= bound))
            fail_msg("%s, %s rows, %s: mean KL %.2e, at most %.2e", isa,
                     prompt ? "prompt" : "generated", families[i].name, kl, bound);
        most = fmax(most, kl);
        ratio = fmax(ratio, kl / bound);
        free(z);
        file_close(&g.file);
    }
    fprintf(stderr, "  %-7s %-9s rows: mean KL at most %.1e, %.2f of its bound\n", isa,
            prompt ? "prompt" : "generated", most, ratio);
}

static void test_families_fast(void) {
    static const char *const isas[] = {"plain", "avx2", "avxvnni", "avx512", "amx"};
    for (size_t k = 0; k < sizeof isas / sizeof *isas; k++) {
        if (!isa_runs(isas[k])) {
            fprintf(stderr, "  %s does not run here\n", isas[k]);
            continue;
        }
        check_fast(isas[k], false);
        check_fast(isas[k], true);
    }
}

const struct test tests[] = {
    {"families_reference", TEST_QUICK, 60000, test_families_reference},
    {"families_formats_agree", TEST_QUICK, 60000, test_families_formats_agree},
    {"families_mistakes_show", TEST_QUICK, 120000, test_families_mistakes_show},
    {"families_norm_order_shows", TEST_QUICK, 60000, test_families_norm_order_shows},
    {"families_fast", TEST_QUICK, 120000, test_families_fast},
    {0},
};
