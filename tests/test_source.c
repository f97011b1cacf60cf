/* model/source: a tiny two-layer model is written as a GGUF and as a Hugging Face folder; both must
 * give the same view. Then one tensor at a time is taken away, reshaped, retyped or added, and the
 * error must name it. */
#include "tests/harness.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>

#include "base/err.h"
#include "model/gguf.h"
#include "model/source.h"
#include "tests/fail_alloc.h"
#include "tests/gguf_builder.h"

enum { LAYERS = 2, HIDDEN = 32, FFN = 64, HEADS = 2, KV_HEADS = 1, HEAD_DIM = 16, VOCAB = 40 };
enum { MAX_ITEMS = 64, F32 = 0, F16 = 1, Q8_0 = 8 };

struct item {
    char name[64];
    int rows, cols; /* rows 0: a vector */
    int type;
};

/* What a file holds, as a list that tests change before it is written. */
struct content {
    struct item items[MAX_ITEMS];
    int n;
    const char *arch;
    uint32_t split_count;
    float rope_factor;
};

static void add(struct content *c, const char *name, int rows, int cols, int type) {
    struct item *it = &c->items[c->n++];
    assert_true(c->n <= MAX_ITEMS);
    snprintf(it->name, sizeof it->name, "%s", name);
    it->rows = rows;
    it->cols = cols;
    it->type = type;
}

static void add_layer(struct content *c, bool hf, int layer, const char *gguf, const char *name,
                      int rows, int cols) {
    char full[64];
    if (hf) snprintf(full, sizeof full, "model.layers.%d.%s", layer, name);
    else snprintf(full, sizeof full, "blk.%d.%s", layer, gguf);
    add(c, full, rows, cols, rows ? F16 : F32);
}

static struct content make_content(bool hf, const char *arch) {
    struct content c = {.arch = arch, .rope_factor = 2};
    bool qwen2 = strcmp(arch, "qwen2") == 0, qwen3 = strcmp(arch, "qwen3") == 0;
    add(&c, hf ? "model.embed_tokens.weight" : "token_embd.weight", VOCAB, HIDDEN, F16);
    add(&c, hf ? "model.norm.weight" : "output_norm.weight", 0, HIDDEN, F32);
    for (int i = 0; i < LAYERS; i++) {
        add_layer(&c, hf, i, "attn_norm.weight", "input_layernorm.weight", 0, HIDDEN);
        add_layer(&c, hf, i, "attn_q.weight", "self_attn.q_proj.weight", HEADS * HEAD_DIM, HIDDEN);
        add_layer(&c, hf, i, "attn_k.weight", "self_attn.k_proj.weight", KV_HEADS * HEAD_DIM,
                  HIDDEN);
        add_layer(&c, hf, i, "attn_v.weight", "self_attn.v_proj.weight", KV_HEADS * HEAD_DIM,
                  HIDDEN);
        add_layer(&c, hf, i, "attn_output.weight", "self_attn.o_proj.weight", HIDDEN,
                  HEADS * HEAD_DIM);
        add_layer(&c, hf, i, "ffn_norm.weight", "post_attention_layernorm.weight", 0, HIDDEN);
        add_layer(&c, hf, i, "ffn_gate.weight", "mlp.gate_proj.weight", FFN, HIDDEN);
        add_layer(&c, hf, i, "ffn_up.weight", "mlp.up_proj.weight", FFN, HIDDEN);
        add_layer(&c, hf, i, "ffn_down.weight", "mlp.down_proj.weight", HIDDEN, FFN);
        if (qwen2) {
            add_layer(&c, hf, i, "attn_q.bias", "self_attn.q_proj.bias", 0, HEADS * HEAD_DIM);
            add_layer(&c, hf, i, "attn_k.bias", "self_attn.k_proj.bias", 0, KV_HEADS * HEAD_DIM);
            add_layer(&c, hf, i, "attn_v.bias", "self_attn.v_proj.bias", 0, KV_HEADS * HEAD_DIM);
        }
        if (qwen3) {
            add_layer(&c, hf, i, "attn_q_norm.weight", "self_attn.q_norm.weight", 0, HEAD_DIM);
            add_layer(&c, hf, i, "attn_k_norm.weight", "self_attn.k_norm.weight", 0, HEAD_DIM);
        }
    }
    return c;
}

static struct item *find_item(struct content *c, const char *name) {
    for (int i = 0; i < c->n; i++)
        if (strcmp(c->items[i].name, name) == 0) return &c->items[i];
    fail_msg("no item %s", name);
    return NULL;
}

static size_t item_bytes(const struct item *it) {
    size_t n = (size_t)(it->rows ? it->rows : 1) * (size_t)it->cols;
    return it->type == F32 ? 4 * n : it->type == F16 ? 2 * n : n / 32 * 34;
}

/* ---- Files ---- */

static char folder[64], path[128];

static const char *in_folder(const char *name) {
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void make_folder(void) {
    snprintf(folder, sizeof folder, "/tmp/tandem_test_src_XXXXXX");
    assert_non_null(mkdtemp(folder));
}

static void write_file(const char *name, const void *data, size_t n) {
    FILE *f = fopen(in_folder(name), "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, n, f), n);
    fclose(f);
}

static void write_text(const char *name, const char *text) {
    write_file(name, text, strlen(text));
}

static void remove_folder(void) {
    static const char *const names[] = {
        "m.gguf",      "config.json",         "model.safetensors",
        "m.bin",       "pytorch_model.bin",   "tokenizer_config.json",
        "header.gguf", "chat_template.jinja", "plan.json"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) unlink(in_folder(names[i]));
    assert_int_equal(rmdir(folder), 0);
}

/* Every weight's bytes hold its index; rope factors are real. */
static void put_item_data(struct strbuf *b, const struct content *c, int i) {
    size_t n = item_bytes(&c->items[i]);
    bool factors = strcmp(c->items[i].name, "rope_freqs.weight") == 0;
    for (size_t k = 0; k < n / 4 && factors; k++) strbuf_append(b, &c->rope_factor, 4);
    for (size_t k = 0; k < n && !factors; k++) strbuf_append_char(b, (char)i);
}

static void write_gguf(const char *name, const struct content *c) {
    struct strbuf b = {0};
    char key[64];
    static const struct {
        const char *key;
        uint32_t v;
    } keys[] = {{"block_count", LAYERS},
                {"embedding_length", HIDDEN},
                {"feed_forward_length", FFN},
                {"attention.head_count", HEADS},
                {"attention.head_count_kv", KV_HEADS},
                {"context_length", 256},
                {"vocab_size", VOCAB}};
    put_header(&b, 3, (uint64_t)c->n, 11);
    put_key_str(&b, "general.architecture", c->arch);
    for (int i = 0; i < 7; i++) {
        snprintf(key, sizeof key, "%s.%s", c->arch, keys[i].key);
        put_key_u32(&b, key, keys[i].v);
    }
    snprintf(key, sizeof key, "%s.attention.layer_norm_rms_epsilon", c->arch);
    put_key_f32(&b, key, 1e-5f);
    put_key_str(&b, "tokenizer.chat_template", "{{ gguf }}");
    put_key_u32(&b, "split.count", c->split_count);
    uint64_t offset = 0;
    for (int i = 0; i < c->n; i++) {
        const struct item *it = &c->items[i];
        uint64_t dims[2] = {(uint64_t)it->cols, (uint64_t)it->rows};
        put_tensor(&b, it->name, it->rows ? 2 : 1, dims, (uint32_t)it->type, offset);
        offset = (offset + item_bytes(it) + 31) / 32 * 32;
    }
    for (int i = 0; i < c->n; i++) {
        put_padding(&b, 32);
        put_item_data(&b, c, i);
    }
    write_file(name, b.data, b.n);
    strbuf_deinit(&b);
}

static void write_config(const char *name, const char *class, const char *more) {
    char text[1024];
    snprintf(
        text, sizeof text,
        "{\"architectures\":[\"%s\"],\"num_hidden_layers\":%d,\"hidden_size\":%d,"
        "\"intermediate_size\":%d,\"num_attention_heads\":%d,\"num_key_value_heads\":%d,"
        "\"vocab_size\":%d,\"head_dim\":%d,\"max_position_embeddings\":256,\"rms_norm_eps\":1e-5,"
        "\"torch_dtype\":\"bfloat16\"%s}",
        class, LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, VOCAB, HEAD_DIM, more);
    write_text(name, text);
}

static void write_safetensors(const struct content *c) {
    struct strbuf header = {0}, b = {0};
    size_t offset = 0;
    for (int i = 0; i < c->n; i++) {
        const struct item *it = &c->items[i];
        const char *type = it->type == F32 ? "F32" : it->type == F16 ? "F16" : "I32";
        char shape[64];
        snprintf(shape, sizeof shape, it->rows ? "%d,%d" : "%.0d%d", it->rows, it->cols);
        size_t n = it->type == Q8_0 ? 4 * (size_t)it->cols : item_bytes(it);
        strbuf_printf(&header,
                      "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%zu,%zu]}",
                      i ? "," : "{", it->name, type, shape, offset, offset + n);
        offset += n;
    }
    strbuf_append_char(&header, '}');
    put_little(&b, header.n, 8);
    strbuf_append(&b, header.data, header.n);
    for (int i = 0; i < c->n; i++) {
        if (c->items[i].type == Q8_0) put_zeros(&b, 4 * (size_t)c->items[i].cols);
        else put_item_data(&b, c, i);
    }
    write_file("model.safetensors", b.data, b.n);
    strbuf_deinit(&b);
    strbuf_deinit(&header);
}

/* ---- Good ones
 * ----------------------------------------------------------------------------------- */

static void check_view(const struct model_source *s, enum tensor_role role, int layer, int rows,
                       int cols) {
    struct tensor_view v;
    struct err e = {0};
    assert_ok(model_source_find(s, role, layer, &v, &e), e);
    assert_int_equal(v.rows, rows);
    assert_int_equal(v.cols, cols);
    assert_int_equal(v.role, role);
    assert_int_equal(v.layer, layer);
}

static void check_all_views(const struct model_source *s) {
    check_view(s, TENSOR_TOKEN_EMBD, 0, VOCAB, HIDDEN);
    check_view(s, TENSOR_OUTPUT_NORM, 0, 1, HIDDEN);
    for (int i = 0; i < LAYERS; i++) {
        check_view(s, TENSOR_ATTN_NORM, i, 1, HIDDEN);
        check_view(s, TENSOR_ATTN_Q, i, HEADS * HEAD_DIM, HIDDEN);
        check_view(s, TENSOR_ATTN_K, i, KV_HEADS * HEAD_DIM, HIDDEN);
        check_view(s, TENSOR_ATTN_V, i, KV_HEADS * HEAD_DIM, HIDDEN);
        check_view(s, TENSOR_ATTN_O, i, HIDDEN, HEADS * HEAD_DIM);
        check_view(s, TENSOR_FFN_NORM, i, 1, HIDDEN);
        check_view(s, TENSOR_FFN_GATE, i, FFN, HIDDEN);
        check_view(s, TENSOR_FFN_UP, i, FFN, HIDDEN);
        check_view(s, TENSOR_FFN_DOWN, i, HIDDEN, FFN);
    }
}

enum {
    PARAMS = VOCAB * HIDDEN + HIDDEN +
             LAYERS * (2 * HIDDEN + 2 * HIDDEN * HEADS * HEAD_DIM +
                       2 * HIDDEN * KV_HEADS * HEAD_DIM + 3 * FFN * HIDDEN)
};

static void test_source_gguf(void) {
    make_folder();
    struct model_source *s;
    struct tensor_view v;
    struct err e = {0};
    struct content c = make_content(false, "llama");
    write_gguf("m.gguf", &c);
    assert_ok(model_source_open(&s, in_folder("m.gguf"), &e), e);
    check_all_views(s);
    assert_true(model_source_has_weights(s));
    assert_non_null(model_source_gguf(s));
    assert_null(model_source_folder(s));
    assert_int_equal(model_source_n_tensors(s), 2 + 9 * LAYERS);
    assert_int_equal(model_source_n_params(s), PARAMS);
    assert_int_equal(model_source_bytes(s), 2 * PARAMS + 2 * (1 + 2 * LAYERS) * HIDDEN);
    assert_int_equal(model_source_find(s, TENSOR_OUTPUT, 0, &v, &e), E_NOT_FOUND);
    assert_int_equal(model_source_find(s, TENSOR_Q_BIAS, 1, &v, &e), E_NOT_FOUND);
    assert_int_equal(model_source_find(s, TENSOR_ROPE_FREQS, 0, &v, &e), E_NOT_FOUND);
    assert_ok(model_source_find(s, TENSOR_FFN_DOWN, 1, &v, &e), e);
    assert_string_equal(v.name, "blk.1.ffn_down.weight");
    assert_int_equal(v.dtype, KERN_F16);
    assert_int_equal(((const uint8_t *)v.data)[v.bytes - 1], c.n - 1);
    size_t n;
    const char *text = model_source_chat_template(s, &n);
    assert_int_equal(n, 10);
    assert_string_equal(text, "{{ gguf }}");
    /* In order: the model's own, then layer by layer. */
    assert_string_equal(model_source_tensor_at(s, 2)->name, "blk.0.attn_norm.weight");
    assert_int_equal(model_source_tensor_at(s, 11)->layer, 1);
    assert_null(model_source_tensor_at(s, 20));
    uint64_t fingerprint = model_source_fingerprint(s);
    model_source_close(s);

    /* Other weights, other fingerprint; the same file, the same. */
    assert_ok(model_source_open(&s, in_folder("m.gguf"), &e), e);
    assert_true(model_source_fingerprint(s) == fingerprint);
    model_source_close(s);
    struct item swapped = c.items[3];
    c.items[3] = c.items[4 + 4]; /* ffn_gate and attn_q change places: other bytes in each */
    c.items[4 + 4] = swapped;
    write_gguf("m.gguf", &c);
    assert_ok(model_source_open(&s, path, &e), e);
    assert_true(model_source_fingerprint(s) != fingerprint);
    model_source_close(s);
    remove_folder();
}

static void test_source_gguf_extras(void) {
    make_folder();
    struct model_source *s;
    struct tensor_view v;
    struct err e = {0};
    struct content c = make_content(false, "llama");
    add(&c, "rope_freqs.weight", 0, HEAD_DIM / 2, F32);
    add(&c, "output.weight", VOCAB, HIDDEN, Q8_0);
    write_gguf("m.gguf", &c);
    assert_ok(model_source_open(&s, in_folder("m.gguf"), &e), e);
    assert_false(model_source_config(s)->tied);
    assert_ok(model_source_find(s, TENSOR_OUTPUT, 0, &v, &e), e);
    assert_int_equal(v.dtype, KERN_Q8_0);
    assert_int_equal(v.bytes, VOCAB * HIDDEN / 32 * 34);
    assert_ok(model_source_find(s, TENSOR_ROPE_FREQS, 0, &v, &e), e);
    assert_int_equal(v.cols, HEAD_DIM / 2);
    model_source_close(s);
    c = make_content(false, "qwen2");
    write_gguf("m.gguf", &c);
    assert_ok(model_source_open(&s, in_folder("m.gguf"), &e), e);
    check_view(s, TENSOR_Q_BIAS, 1, 1, HEADS * HEAD_DIM);
    check_view(s, TENSOR_V_BIAS, 0, 1, KV_HEADS * HEAD_DIM);
    model_source_close(s);
    c = make_content(false, "qwen3");
    write_gguf("m.gguf", &c);
    assert_ok(model_source_open(&s, in_folder("m.gguf"), &e), e);
    check_view(s, TENSOR_K_NORM, 1, 1, HEAD_DIM);
    model_source_close(s);
    remove_folder();
}

static void test_source_folder(void) {
    make_folder();
    struct model_source *s;
    struct tensor_view v;
    struct err e = {0};
    size_t n;
    struct content c = make_content(true, "llama");
    add(&c, "lm_head.weight", VOCAB, HIDDEN, F16);
    add(&c, "model.layers.0.self_attn.rotary_emb.inv_freq", 0, HEAD_DIM / 2, F32);
    write_config("config.json", "LlamaForCausalLM", "");
    write_safetensors(&c);
    assert_ok(model_source_open(&s, folder, &e), e);
    check_all_views(s);
    assert_ok(model_source_find(s, TENSOR_OUTPUT, 0, &v, &e), e);
    assert_string_equal(v.name, "lm_head.weight");
    assert_null(model_source_gguf(s));
    assert_string_equal(model_source_folder(s), folder);
    assert_null(model_source_chat_template(s, &n));
    assert_ok(model_source_find(s, TENSOR_FFN_DOWN, 1, &v, &e), e);
    assert_int_equal(((const uint8_t *)v.data)[v.bytes - 1], c.n - 3);
    model_source_close(s);

    /* Tied: a head in the file is the embedding again and not looked at. */
    write_config("config.json", "LlamaForCausalLM", ",\"tie_word_embeddings\":true");
    assert_ok(model_source_open(&s, folder, &e), e);
    assert_int_equal(model_source_find(s, TENSOR_OUTPUT, 0, &v, &e), E_NOT_FOUND);
    assert_int_equal(model_source_n_params(s), PARAMS);
    model_source_close(s);

    /* The template: a list, a string, and a file that comes before both. */
    write_text("tokenizer_config.json",
               "{\"chat_template\":[{\"name\":\"tool\",\"template\":\"t\"},"
               "{\"name\":\"default\",\"template\":\"listed\"}]}");
    assert_ok(model_source_open(&s, folder, &e), e);
    assert_string_equal(model_source_chat_template(s, &n), "listed");
    model_source_close(s);
    write_text("tokenizer_config.json", "{\"chat_template\":\"plain\"}");
    assert_ok(model_source_open(&s, folder, &e), e);
    assert_string_equal(model_source_chat_template(s, &n), "plain");
    model_source_close(s);
    write_text("chat_template.jinja", "jinja");
    assert_ok(model_source_open(&s, folder, &e), e);
    assert_string_equal(model_source_chat_template(s, &n), "jinja");
    assert_int_equal(n, 5);
    model_source_close(s);
    unlink(in_folder("chat_template.jinja"));
    write_text("tokenizer_config.json", "{\"chat_template\"");
    assert_int_equal(model_source_open(&s, folder, &e), E_FORMAT);
    assert_non_null(strstr(e.message, "tokenizer_config.json: JSON, line 1"));
    remove_folder();
}

static void test_source_plan_only(void) {
    make_folder();
    struct model_source *s;
    struct err e = {0};
    write_config("config.json", "Qwen2ForCausalLM", ",\"tie_word_embeddings\":true");
    write_config("plan.json", "Qwen2ForCausalLM", ",\"tie_word_embeddings\":true");
    assert_int_equal(model_source_open(&s, folder, &e), E_NOT_FOUND); /* no weights */
    assert_ok(model_source_plan_only(&s, folder, &e), e);
    assert_false(model_source_has_weights(s));
    check_all_views(s);
    check_view(s, TENSOR_K_BIAS, 1, 1, KV_HEADS * HEAD_DIM);
    assert_null(model_source_tensor_at(s, 0)->data);
    assert_int_equal(model_source_tensor_at(s, 0)->dtype, KERN_BF16);
    assert_int_equal(model_source_bytes(s), 2 * model_source_n_params(s));
    assert_int_equal(model_source_n_params(s), PARAMS + LAYERS * (HEADS + 2 * KV_HEADS) * HEAD_DIM);
    uint64_t bytes = model_source_bytes(s);
    model_source_close(s);
    assert_ok(model_source_plan_only(&s, in_folder("plan.json"), &e), e);
    assert_int_equal(model_source_bytes(s), bytes);
    model_source_close(s);

    /* The beginning of a GGUF. */
    struct content c = make_content(false, "llama");
    write_gguf("m.gguf", &c);
    char *head = malloc(4000);
    FILE *f = fopen(in_folder("m.gguf"), "rb");
    assert_int_equal(fread(head, 1, 4000, f), 4000);
    fclose(f);
    write_file("header.gguf", head, 4000);
    free(head);
    assert_int_equal(model_source_open(&s, in_folder("header.gguf"), &e), E_FORMAT);
    assert_ok(model_source_plan_only(&s, in_folder("header.gguf"), &e), e);
    assert_false(model_source_has_weights(s));
    assert_int_equal(model_source_n_params(s), PARAMS);
    model_source_close(s);
    remove_folder();
}

/* ---- Lies
 * ---------------------------------------------------------------------------------------- */

enum change { GONE, SHAPE, TYPE, ADDED };

static const struct {
    bool hf;
    const char *arch, *name;
    enum change change;
    int rows, cols, type;
    int code;
    const char *text;
} lies[] = {
    {false, "llama", "token_embd.weight", GONE, 0, 0, 0, E_FORMAT,
     "tensor token_embd.weight is missing"},
    {false, "llama", "output_norm.weight", GONE, 0, 0, 0, E_FORMAT,
     "output_norm.weight is missing"},
    {false, "llama", "blk.1.ffn_up.weight", GONE, 0, 0, 0, E_FORMAT,
     "blk.1.ffn_up.weight is missing"},
    {false, "qwen2", "blk.1.attn_k.bias", GONE, 0, 0, 0, E_FORMAT, "blk.1.attn_k.bias is missing"},
    {false, "qwen3", "blk.0.attn_q_norm.weight", GONE, 0, 0, 0, E_FORMAT,
     "attn_q_norm.weight is missing"},
    {false, "llama", "blk.0.attn_k.weight", SHAPE, 32, 32, F16, E_FORMAT,
     "tensor blk.0.attn_k.weight has the shape [32 x 32]; by the config it is [16 x 32]"},
    {false, "llama", "blk.1.ffn_down.weight", SHAPE, 64, 32, F16, E_FORMAT, "[32 x 64]"},
    {false, "llama", "blk.0.attn_norm.weight", SHAPE, 0, 31, F32, E_FORMAT, "the shape [31]"},
    {false, "llama", "blk.0.attn_norm.weight", SHAPE, 2, 16, F32, E_FORMAT, "the shape [2 x 16]"},
    {false, "llama", "blk.0.attn_q.weight", SHAPE, 0, 32, F16, E_FORMAT, "the shape [32]"},
    {false, "llama", "blk.0.attn_norm.weight", SHAPE, 0, 32, Q8_0, E_UNSUPPORTED,
     "a quantised vector"},
    {false, "llama", "blk.0.attn_output.bias", ADDED, 0, 32, F32, E_UNSUPPORTED,
     "tensor blk.0.attn_output.bias has no place in a llama of 2 layers"},
    {false, "llama", "blk.2.attn_norm.weight", ADDED, 0, 32, F32, E_UNSUPPORTED, "blk.2.attn_norm"},
    {false, "llama", "blk.0.attn_q_norm.weight", ADDED, 0, 16, F32, E_UNSUPPORTED, "attn_q_norm"},
    {false, "llama", "rope_freqs.weight", ADDED, 0, 7, F32, E_FORMAT, "the shape [7]"},
    {false, "llama", "rope_freqs.weight", ADDED, 0, 8, F16, E_UNSUPPORTED, "not of type F32"},
    {true, "llama", "model.embed_tokens.weight", GONE, 0, 0, 0, E_FORMAT,
     "embed_tokens.weight is missing"},
    {true, "llama", "model.layers.1.mlp.up_proj.weight", GONE, 0, 0, 0, E_FORMAT,
     "up_proj.weight is missing"},
    {true, "llama", "model.layers.0.self_attn.k_proj.weight", SHAPE, 32, 32, F16, E_FORMAT,
     "[16 x 32]"},
    {true, "llama", "model.layers.0.self_attn.k_proj.weight", SHAPE, 0, 512, F16, E_FORMAT,
     "[512]"},
    {true, "llama", "model.norm.weight", SHAPE, 0, 32, Q8_0, E_UNSUPPORTED,
     "tensor model.norm.weight: type I32 is not supported"},
    {true, "llama", "model.layers.0.self_attn.q_proj.bias", ADDED, 0, 32, F32, E_UNSUPPORTED,
     "q_proj.bias"},
};

static void test_source_names_every_lie(void) {
    make_folder();
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        struct content c = make_content(lies[i].hf, lies[i].arch);
        if (lies[i].change == ADDED)
            add(&c, lies[i].name, lies[i].rows, lies[i].cols, lies[i].type);
        else {
            struct item *it = find_item(&c, lies[i].name);
            if (lies[i].change == GONE) *it = c.items[--c.n];
            else {
                it->rows = lies[i].rows;
                it->cols = lies[i].cols;
                it->type = lies[i].type;
            }
        }
        if (lies[i].hf) {
            write_config("config.json", "LlamaForCausalLM", ",\"tie_word_embeddings\":true");
            write_safetensors(&c);
        } else write_gguf("m.gguf", &c);
        struct model_source *s;
        struct err e = {0};
        int rc = model_source_open(&s, lies[i].hf ? folder : in_folder("m.gguf"), &e);
        if (rc != lies[i].code || !strstr(e.message, lies[i].text) || !strstr(e.message, folder))
            fail_msg("%s: %s \"%s\", wanted \"%s\"", lies[i].name, err_name(rc), e.message,
                     lies[i].text);
        assert_null(s);
    }
    remove_folder();
}

static void expect(const char *what, int code, const char *text) {
    struct model_source *s;
    struct err e = {0};
    int rc = model_source_open(&s, what, &e);
    if (rc != code || !strstr(e.message, text))
        fail_msg("%s: %s \"%s\", wanted \"%s\"", what, err_name(rc), e.message, text);
}

static void test_source_refuses_other_files(void) {
    make_folder();
    expect(folder, E_NOT_FOUND, "no config.json in it");
    expect(in_folder("nothing.gguf"), E_NOT_FOUND, "nothing.gguf: No such file");
    write_file("m.bin", "PK\3\4 and so on", 14);
    expect(in_folder("m.bin"), E_UNSUPPORTED, "PyTorch checkpoints are not read");
    write_file("m.gguf", "\x80\2}q and so on", 14); /* whatever its name says */
    expect(in_folder("m.gguf"), E_FORMAT, "no GGUF file");
    write_config("config.json", "LlamaForCausalLM", "");
    expect(in_folder("config.json"), E_UNSUPPORTED, "give the folder");
    expect(folder, E_NOT_FOUND, "neither model.safetensors nor");
    write_text("pytorch_model.bin", "x");
    expect(folder, E_UNSUPPORTED, "PyTorch checkpoints are not read");
    struct content c = make_content(true, "llama");
    write_safetensors(&c);
    expect(in_folder("model.safetensors"), E_UNSUPPORTED, "give the folder");
    expect(folder, E_FORMAT, "lm_head.weight is missing and tie_word_embeddings is not true");
    write_config("config.json", "MixtralForCausalLM", "");
    expect(folder, E_UNSUPPORTED, "config.json: architecture 'MixtralForCausalLM'");

    c.n = 0; /* to plan with, not to load */
    write_gguf("m.gguf", &c);
    expect(in_folder("m.gguf"), E_FORMAT, "no tensors in it");
    struct model_source *s;
    struct err e = {0};
    assert_ok(model_source_plan_only(&s, in_folder("m.gguf"), &e), e);
    assert_int_equal(model_source_n_params(s), PARAMS);
    assert_int_equal(model_source_bytes(s), 2 * PARAMS);
    model_source_close(s);
    c = make_content(false, "llama");
    c.split_count = 2;
    write_gguf("m.gguf", &c);
    expect(in_folder("m.gguf"), E_UNSUPPORTED, "one of 2 parts of a split GGUF");
    c = make_content(false, "llama");
    add(&c, "rope_freqs.weight", 0, HEAD_DIM / 2, F32);
    c.rope_factor = 0;
    write_gguf("m.gguf", &c);
    expect(in_folder("m.gguf"), E_FORMAT, "rope_freqs.weight: factor 0 is 0");
    remove_folder();
}

/* The n-th allocation fails, and all after it, for every n until the file opens: each time E_NOMEM,
 * and nothing is left behind. */
static void check_every_allocation(const char *what) {
    long before = fail_alloc_live();
    for (long n = 1;; n++) {
        struct model_source *s;
        struct err e = {0};
        fail_alloc_at(n);
        int rc = model_source_open(&s, what, &e);
        long failed = fail_alloc_n_failed();
        fail_alloc_at(0);
        if (rc == 0) model_source_close(s);
        if (fail_alloc_live() != before)
            fail_msg("%s: %ld blocks left when allocation %ld fails", what,
                     fail_alloc_live() - before, n);
        if (failed == 0) {
            assert_int_equal(rc, 0);
            assert_true(n > 10); /* the hooks are live */
            return;
        }
        /* jansson's lexer tells a failed allocation as a syntax error. */
        bool lexer = rc == E_FORMAT && strstr(e.message, "JSON, line");
        if (rc != E_NOMEM && !lexer)
            fail_msg("%s: %s \"%s\" when allocation %ld fails", what, err_name(rc), e.message, n);
    }
}

static void test_source_out_of_memory(void) {
    make_folder();
    json_set_alloc_funcs(fail_alloc_malloc, fail_alloc_free);
    struct content c = make_content(false, "qwen3");
    write_gguf("m.gguf", &c);
    check_every_allocation(in_folder("m.gguf"));
    c = make_content(true, "llama");
    write_config("config.json", "LlamaForCausalLM", ",\"tie_word_embeddings\":true");
    write_text("tokenizer_config.json", "{\"chat_template\":\"plain\"}");
    write_safetensors(&c);
    check_every_allocation(folder);
    remove_folder();
}

static void test_source_default_target(void) {
    struct model_source *s;
    struct tensor_view v;
    struct err e = {0};
    assert_ok(model_source_open(&s, test_default_target(), &e), e);
    assert_int_equal(model_source_n_tensors(s), 272);
    assert_int_equal(model_source_n_params(s), 134515008);
    assert_ok(model_source_find(s, TENSOR_TOKEN_EMBD, 0, &v, &e), e);
    assert_int_equal(v.dtype, KERN_Q8_0);
    assert_int_equal(v.rows, 49152);
    assert_ok(model_source_find(s, TENSOR_ATTN_K, 29, &v, &e), e);
    assert_int_equal(v.dtype, KERN_Q4_1);
    assert_int_equal(v.rows, 192);
    assert_int_equal(v.bytes, 192 * 576 / 32 * 20);
    size_t n;
    assert_non_null(strstr(model_source_chat_template(s, &n), "<|im_start|>"));
    model_source_close(s);
}

const struct test tests[] = {
    {"source_gguf", TEST_QUICK, 5000, test_source_gguf},
    {"source_gguf_extras", TEST_QUICK, 5000, test_source_gguf_extras},
    {"source_folder", TEST_QUICK, 5000, test_source_folder},
    {"source_plan_only", TEST_QUICK, 5000, test_source_plan_only},
    {"source_names_every_lie", TEST_QUICK, 10000, test_source_names_every_lie},
    {"source_refuses_other_files", TEST_QUICK, 5000, test_source_refuses_other_files},
    {"source_out_of_memory", TEST_QUICK, 20000, test_source_out_of_memory},
    {"source_default_target", TEST_QUICK, 5000, test_source_default_target},
    {0},
};
