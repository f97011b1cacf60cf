/* Goal: --load-format dummy gives a model of the asked shape whose weights are random, the same
 * every time, and says so wherever its name is shown. Method: tensors of every type looked at as
 * numbers; configs of each family opened, planned and run on the CPU; pairs of two configs; GGUF
 * files whose weights must not be read; the bench's shapes counted against the published numbers of
 * parameters. */
#include "tests/harness.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/err.h"
#include "base/threads.h"
#include "engine/engine.h"
#include "model/model_private.h"
#include "model/source.h"
#include "tests/engine_helper.h"

enum { CONTEXT = 512 };

/* ---- Tensors ---- */

static float *made(const struct tensor_view *v, int n_threads, uint8_t *bytes) {
    struct threads *t;
    struct err e = {0};
    assert_ok(threads_open(&t, n_threads, &e), e);
    model__dummy_fill(v, bytes, t);
    threads_close(t);
    size_t n = (size_t)v->rows * (size_t)v->cols;
    float *x = malloc(n * sizeof *x);
    assert_non_null(x);
    kern_dequantize(v->dtype, bytes, x, n);
    return x;
}

static struct tensor_view view_of(enum kern_dtype t, enum tensor_role role, int layer, int rows,
                                  int cols) {
    return (struct tensor_view){.name = "x",
                                .dtype = t,
                                .rows = rows,
                                .cols = cols,
                                .bytes = (size_t)rows * kern_dtype_bytes(t, (size_t)cols),
                                .role = role,
                                .layer = layer};
}

/* Of 260,000 values the mean has a standard error of 4e-5 (of Q4_0's blocks of one sign 1e-4), the
 * deviation one of 1.4e-3 of itself; formats with random scales have longer tails. */
static void test_dummy_values(void) {
    for (int t = 0; t < KERN_N_DTYPES; t++) {
        struct tensor_view v = view_of((enum kern_dtype)t, TENSOR_FFN_UP, 3, 508, 512), w;
        uint8_t *a = malloc(v.bytes + 1), *b = malloc(v.bytes + 1);
        assert_true(a && b);
        a[v.bytes] = 0x5A;
        float *x = made(&v, 1, a);
        size_t n = (size_t)v.rows * (size_t)v.cols, n_same = 0;
        double sum = 0, squares = 0, most = 0;
        for (size_t i = 0; i < n; i++) {
            sum += (double)x[i];
            squares += (double)x[i] * (double)x[i];
            most = fmax(most, fabs((double)x[i]));
        }
        printf("%s: mean %.2g, deviation %.4f, most %.3f\n", kern_dtype_name((enum kern_dtype)t),
               sum / (double)n, sqrt(squares / (double)n), most);
        assert_near(sum / (double)n, 0, 6e-4);
        assert_near(sqrt(squares / (double)n), 0.02, 5e-4);
        assert_true(most > 0.03 && most < 0.2);
        assert_int_equal(a[v.bytes], 0x5A);
        for (int threads = 2; threads < 4; threads++) {
            free(made(&v, threads, b));
            assert_memory_equal(a, b, v.bytes);
        }
        /* Another layer, another role: other values. */
        w = v;
        w.layer = 4;
        float *y = made(&w, 1, b);
        for (size_t i = 0; i < n; i++) n_same += x[i] == y[i];
        assert_true(n_same < n / 5);
        w = v;
        w.role = TENSOR_FFN_GATE;
        free(made(&w, 1, b));
        assert_memory_not_equal(a, b, v.bytes);
        free(x), free(y), free(a), free(b);
    }
}

/* Sizes that end inside a word, a block, a thread's share. */
static void test_dummy_tails(void) {
    static const int rows[] = {1, 2, 3, 63, 64, 65, 1023, 1025, 2049};
    for (int t = 0; t < KERN_N_DTYPES; t++)
        for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
            int block = kern_dtype_block((enum kern_dtype)t);
            struct tensor_view v =
                view_of((enum kern_dtype)t, TENSOR_ATTN_O, 0, rows[i], block == 1 ? 3 : block);
            uint8_t *a = malloc(v.bytes + 8), *b = malloc(v.bytes + 8);
            assert_true(a && b);
            memset(a, 0xA5, v.bytes + 8), memset(b, 0xA5, v.bytes + 8);
            float *x = made(&v, 1, a), *y = made(&v, 5, b);
            assert_memory_equal(a, b, v.bytes + 8);
            for (int k = 0; k < 8; k++) assert_int_equal(a[v.bytes + (size_t)k], 0xA5);
            for (int k = 0; k < v.rows * v.cols; k++) assert_true(fabsf(x[k]) < 0.2f);
            free(a), free(b), free(x), free(y);
        }
}

static void test_dummy_norms(void) {
    static const enum tensor_role ones[] = {TENSOR_OUTPUT_NORM, TENSOR_ATTN_NORM,
                                            TENSOR_FFN_NORM,    TENSOR_Q_NORM,
                                            TENSOR_K_NORM,      TENSOR_ROPE_FREQS};
    for (int t = KERN_F32; t <= KERN_BF16; t++)
        for (size_t i = 0; i < sizeof ones / sizeof *ones; i++) {
            struct tensor_view v = view_of((enum kern_dtype)t, ones[i], 1, 1, 37);
            uint8_t bytes[37 * 4];
            float *x = made(&v, 2, bytes);
            for (int k = 0; k < 37; k++) assert_true(x[k] == 1);
            free(x);
        }
}

/* ---- Sources ---- */

static char folder[64];

static const char *make_folder(void) {
    snprintf(folder, sizeof folder, "/tmp/tandem_test_dummy_XXXXXX");
    assert_non_null(mkdtemp(folder));
    return folder;
}

/* A config of `family` with `vocab` rows; returns its path (static buffer). */
static const char *write_config(const char *in, const char *family, int vocab, const char *type) {
    static char path[128];
    bool qwen = !strncmp(family, "qwen", 4);
    snprintf(path, sizeof path, "%s/config.json", in);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fprintf(f,
            "{\"model_type\": \"%s\", \"architectures\": [\"%s\"], \"torch_dtype\": \"%s\", "
            "\"hidden_size\": 256, \"intermediate_size\": 512, \"num_hidden_layers\": 3, "
            "\"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"head_dim\": 64, "
            "\"vocab_size\": %d, \"tie_word_embeddings\": %s, \"max_position_embeddings\": %d, "
            "\"rms_norm_eps\": 1e-5, \"rope_theta\": 10000.0}",
            family,
            !strcmp(family, "qwen2")   ? "Qwen2ForCausalLM"
            : !strcmp(family, "qwen3") ? "Qwen3ForCausalLM"
                                       : "LlamaForCausalLM",
            type, vocab, qwen ? "true" : "false", CONTEXT);
    assert_int_equal(fclose(f), 0);
    return path;
}

static void clean(const char *in, const char *path) {
    unlink(path);
    rmdir(in);
}

static void test_dummy_source(void) {
    const char *in = make_folder(), *path = write_config(in, "llama", 300, "bfloat16");
    struct model_source *s = NULL, *real = NULL;
    struct err e = {0};
    for (int alone = 0; alone < 2; alone++) {
        assert_ok(model_source_open_dummy(&s, alone ? path : in, KERN_N_DTYPES, &e), e);
        assert_true(model_source_is_dummy(s) && !model_source_has_weights(s));
        const char *name = model_source_config(s)->name;
        if (strncmp(name, "tandem_test_dummy_", 18) || !strstr(name, " (random weights)"))
            fail_msg("name '%s'", name);
        for (size_t i = 0; i < model_source_n_tensors(s); i++) {
            assert_int_equal(model_source_tensor_at(s, i)->dtype, KERN_BF16);
            assert_null(model_source_tensor_at(s, i)->data);
        }
        model_source_close(s);
    }
    /* A type for the matrices; vectors stay as they are. */
    assert_ok(model_source_open_dummy(&s, in, KERN_Q4_K, &e), e);
    size_t n_vectors = 0;
    for (size_t i = 0; i < model_source_n_tensors(s); i++) {
        const struct tensor_view *v = model_source_tensor_at(s, i);
        assert_int_equal(v->dtype, v->rows == 1 ? KERN_BF16 : KERN_Q4_K);
        n_vectors += v->rows == 1;
        if (v->rows > 1) assert_int_equal(v->bytes, v->rows * v->cols / 256 * 144);
    }
    assert_int_equal(n_vectors, 1 + 2 * 3);
    /* Asking for the weights themselves names what is missing, and planning makes nothing up. */
    assert_int_equal(model_source_open(&real, in, &e), E_NOT_FOUND);
    assert_ok(model_source_plan_only(&real, in, &e), e);
    assert_false(model_source_is_dummy(real));
    assert_true(model_source_fingerprint(real) != model_source_fingerprint(s));
    model_source_close(real), model_source_close(s);
    clean(in, path);
    assert_int_equal(model_source_open_dummy(&s, "/nowhere/config.json", KERN_F16, &e),
                     E_NOT_FOUND);
}

static void test_dummy_blocks_must_fit(void) {
    struct tiny_options t;
    struct model_source *s = NULL;
    struct err e = {0};
    tiny_model_default(&t); /* 64 columns */
    const char *path = tiny_model_file(&t);
    assert_int_equal(model_source_open_dummy(&s, path, KERN_Q6_K, &e), E_UNSUPPORTED);
    assert_non_null(strstr(e.message, "64 columns"));
    assert_non_null(strstr(e.message, "Q6_K"));
    assert_ok(model_source_open_dummy(&s, path, KERN_Q8_0, &e), e);
    model_source_close(s);
    unlink(path);
}

/* The published numbers of parameters. */
static void test_dummy_bench_configs(void) {
    static const struct {
        const char *path;
        uint64_t n_params;
        int context, n_kv_heads, head_dim;
    } want[] = {{"bench/configs/llama-3.1-8b", 8030261248u, 131072, 8, 128},
                {"bench/configs/llama-3.2-1b", 1235814400u, 131072, 8, 64},
                {"bench/configs/llama-2-7b-32k", 6738415616u, 32768, 32, 128}};
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        struct model_source *s;
        struct err e = {0};
        assert_ok(model_source_open_dummy(&s, want[i].path, KERN_N_DTYPES, &e), e);
        const struct model_config *c = model_source_config(s);
        assert_int_equal(model_source_n_params(s), want[i].n_params);
        assert_int_equal(model_source_bytes(s), 2 * want[i].n_params);
        assert_int_equal(c->context, want[i].context);
        assert_int_equal(c->n_kv_heads, want[i].n_kv_heads);
        assert_int_equal(c->head_dim, want[i].head_dim);
        model_source_close(s);
        assert_ok(model_source_open_dummy(&s, want[i].path, KERN_Q4_K, &e), e);
        model_source_close(s);
    }
}

/* ---- Engines ---- */

static void dummy_options(struct engine_options *o, const char *path) {
    tiny_engine_options(o);
    o->kv_memory_bytes = 32 << 20;
    o->model_path = path;
    o->dummy_weights = true;
}

/* 24 tokens after 70; the request ends by length, since no id ends it. */
static void answer(struct engine *g, int32_t out[24]) {
    int32_t prompt[70];
    struct engine_submit_options s;
    struct engine_progress p;
    for (int i = 0; i < 70; i++) prompt[i] = i * 7 % 256;
    tiny_submit_options(&s, prompt, 70);
    s.params.max_tokens = 24;
    s.params.ignore_eos = true;
    assert_int_equal(tiny_run(g, &s, out, &p), 24);
    assert_int_equal(p.finish, ENGINE_LENGTH);
}

static void test_dummy_engine(void) {
    static const struct {
        const char *family, *type, *dummy_type;
    } cases[] = {{"llama", "bfloat16", NULL},   {"qwen2", "float16", NULL},
                 {"qwen3", "float32", NULL},    {"llama", "bfloat16", "q4_k"},
                 {"qwen2", "bfloat16", "Q8_0"}, {"qwen3", "float16", "Q6_K"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *in = make_folder(),
                   *path = write_config(in, cases[i].family, 300, cases[i].type);
        int32_t first[24], second[24];
        struct engine_options o;
        struct plan plan;
        struct err e = {0};
        dummy_options(&o, i % 2 ? path : in);
        o.dummy_type = cases[i].dummy_type;
        assert_ok(engine_plan(&plan, &o, 0, &e), e);
        for (int again = 0; again < 2; again++) {
            struct engine *g = NULL;
            o.n_threads = 1 + again;
            assert_ok(engine_open(&g, &o, NULL, NULL, &e), e);
            assert_true(engine_is_dummy(g));
            assert_non_null(strstr(engine_model_name(g), "(random weights)"));
            if (!again) assert_int_equal(engine_get_plan(g)->device_bytes, plan.device_bytes);
            assert_true(tokenizer_is_made_up(engine_tokenizer(g)));
            assert_int_equal(tokenizer_n_tokens(engine_tokenizer(g)), 300);
            answer(g, again ? second : first);
            engine_close(g);
        }
        assert_memory_equal(first, second, sizeof first);
        clean(in, path);
    }
}

static void test_dummy_engine_refusals(void) {
    const char *in = make_folder(), *path = write_config(in, "llama", 300, "bfloat16");
    struct engine_options o;
    struct engine *g = NULL;
    struct err e = {0};
    dummy_options(&o, in);
    o.dummy_type = "Q9_9";
    assert_int_equal(engine_open(&g, &o, NULL, NULL, &e), E_INVALID);
    assert_non_null(strstr(e.message, "Q9_9"));
    o.dummy_weights = false;
    o.dummy_type = NULL;
    assert_int_equal(engine_open(&g, &o, NULL, NULL, &e), E_NOT_FOUND);
    assert_null(g);
    clean(in, path);
}

/* What a config says of its type is a name that is known, or nothing. */
static void test_dummy_torch_dtype(void) {
    static const struct {
        const char *type, *said; /* said NULL: taken */
    } cases[] = {
        {"bfloat16", NULL},
        {"torch.float16", NULL},
        {"auto", NULL},
        {"float8_e4m3fn",
         "torch_dtype is \"float8_e4m3fn\": not one of float32, float16, bfloat16"},
        {"floaty", "torch_dtype is \"floaty\""},
        {"", "torch_dtype is \"\""},
        {NULL, "torch_dtype is no string"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *in = make_folder();
        const char *path = write_config(in, "llama", 300, cases[i].type ? cases[i].type : "12");
        struct model_source *s = NULL;
        struct err e = {0};
        if (!cases[i].type) { /* the number itself */
            char text[1024] = "", *at;
            FILE *f = fopen(path, "r+");
            assert_non_null(f);
            text[fread(text, 1, sizeof text - 1, f)] = 0;
            assert_non_null(at = strstr(text, "\"12\""));
            memcpy(at, " 12 ", 4);
            rewind(f);
            assert_int_equal(fwrite(text, 1, strlen(text), f), strlen(text));
            assert_int_equal(fclose(f), 0);
        }
        int rc = model_source_open_dummy(&s, in, KERN_N_DTYPES, &e);
        if (cases[i].said) {
            assert_true(rc == E_UNSUPPORTED || rc == E_FORMAT);
            if (!strstr(e.message, cases[i].said)) fail_msg("%s", e.message);
        } else {
            assert_ok(rc, e);
            model_source_close(s);
        }
        clean(in, path);
    }
}

/* A tokenizer beside a config that has no rows for its tokens is another model's. */
static void test_dummy_large_tokenizer(void) {
    for (int vocab = 100; vocab <= 100000; vocab += 99900) {
        const char *in = make_folder(), *path = write_config(in, "llama", vocab, "bfloat16");
        char link[128], target[PATH_MAX];
        struct model_source *s;
        struct tokenizer *t = NULL;
        struct err e = {0};
        snprintf(link, sizeof link, "%s/tokenizer.json", in);
        assert_non_null(realpath(test_golden("hf_gpt-2.json"), target));
        assert_int_equal(symlink(target, link), 0);
        assert_ok(model_source_open_dummy(&s, in, KERN_N_DTYPES, &e), e);
        int rc = model_open_tokenizer(&t, s, &e);
        if (vocab == 100) {
            assert_int_equal(rc, E_INVALID);
            assert_null(t);
            if (!strstr(e.message, "vocab_size is 100")) fail_msg("%s", e.message);
        } else {
            assert_ok(rc, e);
            tokenizer_close(t);
        }
        model_source_close(s);
        unlink(link);
        clean(in, path);
    }
}

/* A GGUF file gives shapes, types and its tokenizer: the weights are others. */
static void test_dummy_gguf(void) {
    struct tiny_options t;
    tiny_model_default(&t);
    t.head_scale = 4;
    const char *path = tiny_model_file(&t);
    int32_t tokens[2][24];
    for (int dummy = 0; dummy < 2; dummy++) {
        struct engine_options o;
        struct engine *g = NULL;
        struct err e = {0};
        dummy_options(&o, path);
        o.dummy_weights = dummy;
        assert_ok(engine_open(&g, &o, NULL, NULL, &e), e);
        assert_int_equal(engine_is_dummy(g), dummy);
        assert_int_equal(strstr(engine_model_name(g), "(random weights)") != NULL, dummy);
        assert_false(tokenizer_is_made_up(engine_tokenizer(g)));
        assert_true(tokenizer_find(engine_tokenizer(g), "<|im_start|>") == TINY_IM_START);
        answer(g, tokens[dummy]);
        engine_close(g);
    }
    assert_memory_not_equal(tokens[0], tokens[1], sizeof tokens[0]);
    unlink(path);
}

/* Two configs of one vocabulary are a pair, of two vocabularies none. */
static void test_dummy_pair(void) {
    char target[64], draft[64];
    int32_t alone[24], paired[24];
    struct engine_options o;
    struct engine *g = NULL;
    struct err e = {0};
    snprintf(target, sizeof target, "%s", make_folder());
    write_config(target, "llama", 300, "bfloat16");
    snprintf(draft, sizeof draft, "%s", make_folder());
    write_config(draft, "qwen3", 300, "bfloat16");
    for (int with = 0; with < 2; with++) {
        dummy_options(&o, target);
        if (with) o.draft_path = draft, o.draft_tokens = 3;
        assert_ok(engine_open(&g, &o, NULL, NULL, &e), e);
        answer(g, with ? paired : alone);
        if (with) assert_non_null(strstr(engine_draft_config(g)->name, "(random weights)"));
        engine_close(g);
    }
    assert_memory_equal(alone, paired, sizeof alone);
    write_config(draft, "qwen3", 301, "bfloat16");
    g = NULL;
    assert_int_equal(engine_open(&g, &o, NULL, NULL, &e), E_INVALID);
    assert_non_null(strstr(e.message, "300"));
    char file[80];
    snprintf(file, sizeof file, "%s/config.json", target);
    clean(target, file);
    snprintf(file, sizeof file, "%s/config.json", draft);
    clean(draft, file);
}

/* ---- The tokenizer of a model without one ---- */

static void test_dummy_tokenizer(void) {
    static const char text[] = "Ab \xc3\xa9\n\xff\x01z";
    static const int sizes[] = {1, 64, 256, 257, 128256};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        struct tokenizer *t;
        struct tokens ids = {0};
        struct strbuf out = {0};
        struct err e = {0};
        assert_ok(tokenizer_open_bytes(&t, sizes[i], &e), e);
        assert_int_equal(tokenizer_n_tokens(t), sizes[i]);
        assert_true(tokenizer_is_made_up(t) && tokenizer_bos(t) == -1);
        for (int id = 0; id < sizes[i]; id++) assert_false(tokenizer_is_eog(t, id));
        assert_ok(tokenizer_encode(t, text, sizeof text - 1,
                                   TOKENIZER_ADD_SPECIAL | TOKENIZER_PARSE_SPECIAL, &ids, &e),
                  e);
        if (sizes[i] >= 256) {
            assert_int_equal(ids.n, sizeof text - 1);
            for (size_t k = 0; k < ids.n; k++) assert_int_equal(ids.ids[k], (uint8_t)text[k]);
            tokenizer_decode(t, ids.ids, ids.n, false, &out);
            assert_int_equal(out.n, sizeof text - 1);
            assert_memory_equal(out.data, text, out.n);
        }
        if (sizes[i] > 1000) {
            strbuf_clear(&out);
            tokenizer_token_bytes(t, 128255, false, &out);
            assert_string_equal(out.data, " w128255");
        }
        tokens_deinit(&ids);
        strbuf_deinit(&out);
        tokenizer_close(t);
    }
}

const struct test tests[] = {
    {"dummy_values", TEST_QUICK, 60000, test_dummy_values},
    {"dummy_tails", TEST_QUICK, 60000, test_dummy_tails},
    {"dummy_norms", TEST_QUICK, 60000, test_dummy_norms},
    {"dummy_source", TEST_QUICK, 60000, test_dummy_source},
    {"dummy_blocks_must_fit", TEST_QUICK, 60000, test_dummy_blocks_must_fit},
    {"dummy_bench_configs", TEST_QUICK, 60000, test_dummy_bench_configs},
    {"dummy_engine", TEST_QUICK, 120000, test_dummy_engine},
    {"dummy_engine_refusals", TEST_QUICK, 60000, test_dummy_engine_refusals},
    {"dummy_torch_dtype", TEST_QUICK, 10000, test_dummy_torch_dtype},
    {"dummy_large_tokenizer", TEST_QUICK, 10000, test_dummy_large_tokenizer},
    {"dummy_gguf", TEST_QUICK, 60000, test_dummy_gguf},
    {"dummy_pair", TEST_QUICK, 60000, test_dummy_pair},
    {"dummy_tokenizer", TEST_QUICK, 60000, test_dummy_tokenizer},
    {0},
};
