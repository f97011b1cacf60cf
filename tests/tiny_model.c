/* Writer of the tiny GGUF (format: docs/gguf.md of the ggml project; names and keys of its llama
 * architecture). */
#include "tests/tiny_model.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <xxhash.h>

#include "base/half.h"
#include "base/rng.h"
#include "base/utf8.h"
#include "tests/harness.h"

enum { FILE_U32 = 4, FILE_I32 = 5, FILE_F32 = 6, FILE_BOOL = 7, FILE_STRING = 8, FILE_ARRAY = 9 };
enum { ALIGNMENT = 32 };

/* Left and right part, as ids; each result is the next id from TINY_FIRST_MERGE on. Among them a
 * whole U+1F600 and half of one, so that tokens end inside a character. */
static const int merges[][2] = {
    {' ', 't'}, {'h', 'e'},   {256, 257},   {'i', 'n'},   {'a', 'n'}, {' ', 'a'},   {'o', 'u'},
    {'e', 'r'}, {'\n', '\n'}, {0xf0, 0x9f}, {0x98, 0x80}, {265, 266}, {0xc3, 0xa9},
};
_Static_assert(TINY_FIRST_MERGE + sizeof merges / sizeof *merges == TINY_IM_START, "ids follow");

static const char chat_template[] = "{% for message in messages %}{{'<|im_start|>' + "
                                    "message['role'] + '\\n' + message['content'] + "
                                    "'<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt "
                                    "%}{{ '<|im_start|>assistant\\n' }}{% endif %}";

void tiny_model_default(struct tiny_options *o) {
    *o = (struct tiny_options){.n_layers = 3,
                               .hidden = 64,
                               .ffn = 128,
                               .n_heads = 4,
                               .n_kv_heads = 2,
                               .head_dim = 16,
                               .context = 2048,
                               .dtype = KERN_F32,
                               .head_scale = 3,
                               .seed = 1};
}

void tiny_draft_default(struct tiny_draft *d, const struct tiny_options *target) {
    *d = (struct tiny_draft){.n_layers = target->n_layers, .noise = 0.04f, .seed = 1};
}

/* ---- Values ---- */

static void put_u32(struct strbuf *b, uint32_t v) {
    strbuf_append(b, &v, 4);
}
static void put_u64(struct strbuf *b, uint64_t v) {
    strbuf_append(b, &v, 8);
}
static void put_bytes(struct strbuf *b, const char *s, size_t n) {
    put_u64(b, n);
    strbuf_append(b, s, n);
}
static void put_name(struct strbuf *b, const char *s) {
    put_bytes(b, s, strlen(s));
}

static void key_u32(struct strbuf *b, const char *key, uint32_t v) {
    put_name(b, key);
    put_u32(b, FILE_U32);
    put_u32(b, v);
}
static void key_f32(struct strbuf *b, const char *key, float v) {
    put_name(b, key);
    put_u32(b, FILE_F32);
    strbuf_append(b, &v, 4);
}
static void key_str(struct strbuf *b, const char *key, const char *v) {
    put_name(b, key);
    put_u32(b, FILE_STRING);
    put_name(b, v);
}
static void key_array(struct strbuf *b, const char *key, uint32_t type, uint64_t n) {
    put_name(b, key);
    put_u32(b, FILE_ARRAY);
    put_u32(b, type);
    put_u64(b, n);
}

/* GPT-2's alphabet: printable Latin-1 stands for itself, the others count from U+0100. */
static void put_byte_symbol(struct strbuf *b, int byte) {
    uint32_t next = 256, cp = 0;
    for (int i = 0; i <= byte; i++) {
        bool printable = (i >= 33 && i <= 126) || (i >= 161 && i <= 172) || i >= 174;
        cp = printable ? (uint32_t)i : next++;
    }
    char s[4];
    strbuf_append(b, s, (size_t)utf8_encode(cp, s));
}

static void put_symbols(struct strbuf *b, int id) {
    if (id < TINY_FIRST_MERGE) {
        put_byte_symbol(b, id);
        return;
    }
    put_symbols(b, merges[id - TINY_FIRST_MERGE][0]);
    put_symbols(b, merges[id - TINY_FIRST_MERGE][1]);
}

static void put_vocabulary(struct strbuf *b, const struct tiny_options *o) {
    int n_tokens = TINY_VOCAB - o->padded;
    struct strbuf s = {0};
    key_str(b, "tokenizer.ggml.model", "gpt2");
    key_str(b, "tokenizer.ggml.pre", "smollm");
    key_array(b, "tokenizer.ggml.tokens", FILE_STRING, (uint64_t)n_tokens);
    for (int id = 0; id < TINY_IM_START; id++) {
        strbuf_clear(&s);
        put_symbols(&s, id);
        put_bytes(b, s.data, s.n);
    }
    put_name(b, "<|im_start|>");
    put_name(b, "<|im_end|>");
    if (!o->padded) put_name(b, "<|endoftext|>");
    key_array(b, "tokenizer.ggml.token_type", FILE_I32, (uint64_t)n_tokens);
    for (int id = 0; id < n_tokens; id++) put_u32(b, id < TINY_IM_START ? 1 : 3);
    size_t n = sizeof merges / sizeof *merges;
    key_array(b, "tokenizer.ggml.merges", FILE_STRING, n);
    for (size_t i = 0; i < n; i++) {
        strbuf_clear(&s);
        put_symbols(&s, merges[i][0]);
        strbuf_append_char(&s, ' ');
        put_symbols(&s, merges[i][1]);
        put_bytes(b, s.data, s.n);
    }
    strbuf_deinit(&s);
    key_u32(b, "tokenizer.ggml.bos_token_id", TINY_IM_START);
    key_u32(b, "tokenizer.ggml.eos_token_id", TINY_IM_END);
    key_str(b, "tokenizer.chat_template", chat_template);
}
enum { N_VOCABULARY_KEYS = 8 };

/* ---- Tensors ---- */

struct tensor {
    char name[64];
    int rows, cols;         /* rows 0: a vector */
    float scale;            /* of normal-like weights; 0: ones with a little noise (norms) */
    uint64_t draw;          /* which of the target's tensors the numbers are */
    const int32_t *row_ids; /* [rows] rows of the target's tensor; NULL: row = row */
    float noise;            /* share of other numbers, by noise_seed */
    uint64_t noise_seed;
};

static int ggml_number(enum kern_dtype t) {
    if (t == KERN_F32) return 0;
    if (t == KERN_F16) return 1;
    if (t == KERN_Q4_1) return 3;
    if (t == KERN_Q8_0) return 8;
    fail_msg("tiny_model: no writer for dtype %d", t);
    return -1;
}

/* Sum of four uniforms, scaled to unit variance: as good as normal here. */
static float draw(uint64_t seed, uint64_t tensor, uint32_t i) {
    float s = 0;
    for (uint32_t k = 0; k < 4; k++) s += rng_uniform(seed, tensor, RNG_TEST, 4 * i + k);
    return (s - 2) * 1.7320508f;
}

static void put_q8_0(struct strbuf *b, const float *v) {
    float most = 0;
    for (int i = 0; i < 32; i++) most = fmaxf(most, fabsf(v[i]));
    uint16_t d = f32_to_f16(most / 127);
    float back = f16_to_f32(d);
    strbuf_append(b, &d, 2);
    for (int i = 0; i < 32; i++) {
        float q = back > 0 ? roundf(v[i] / back) : 0;
        strbuf_append_char(b, (char)(int8_t)(q > 127 ? 127 : q < -127 ? -127 : q));
    }
}

static void put_q4_1(struct strbuf *b, const float *v) {
    float lo = v[0], hi = v[0];
    for (int i = 1; i < 32; i++) {
        lo = fminf(lo, v[i]);
        hi = fmaxf(hi, v[i]);
    }
    uint16_t d = f32_to_f16((hi - lo) / 15), m = f32_to_f16(lo);
    float scale = f16_to_f32(d), low = f16_to_f32(m);
    strbuf_append(b, &d, 2);
    strbuf_append(b, &m, 2);
    uint8_t q[32];
    for (int i = 0; i < 32; i++) {
        float x = scale > 0 ? roundf((v[i] - low) / scale) : 0;
        q[i] = (uint8_t)(x < 0 ? 0 : x > 15 ? 15 : x);
    }
    for (int i = 0; i < 16; i++) strbuf_append_char(b, (char)(q[i] | q[i + 16] << 4));
}

/* Weight i of the tensor. A draft's noise is drawn by the complement of its seed, so that it is
 * another stream than the weights' whatever the two seeds are. */
static float weight(const struct tensor *t, uint64_t seed, uint32_t i) {
    uint32_t cols = (uint32_t)t->cols;
    if (t->row_ids) i = (uint32_t)t->row_ids[i / cols] * cols + i % cols;
    float x = draw(seed, t->draw, i);
    if (t->noise > 0) x += t->noise * draw(~t->noise_seed, t->draw, i);
    return t->scale > 0 ? t->scale * x : 1 + 0.1f * x;
}

static void put_tensor(struct strbuf *b, const struct tensor *t, const struct tiny_options *o) {
    enum kern_dtype dtype = t->rows ? o->dtype : KERN_F32;
    uint32_t n = (uint32_t)((t->rows ? t->rows : 1) * t->cols);
    float v[32];
    for (uint32_t i = 0; i < n; i += 32) {
        uint32_t width = n - i < 32 ? n - i : 32;
        for (uint32_t k = 0; k < width; k++) v[k] = weight(t, o->seed, i + k);
        if (dtype == KERN_Q8_0) put_q8_0(b, v);
        else if (dtype == KERN_Q4_1) put_q4_1(b, v);
        else
            for (uint32_t k = 0; k < width; k++) {
                uint16_t h = f32_to_f16(v[k]);
                if (dtype == KERN_F16) strbuf_append(b, &h, 2);
                else strbuf_append(b, &v[k], 4);
            }
    }
}

static size_t tensor_bytes(const struct tensor *t, enum kern_dtype matrix) {
    size_t n = (size_t)(t->rows ? t->rows : 1) * (size_t)t->cols;
    if (!t->rows || matrix == KERN_F32) return 4 * n;
    if (matrix == KERN_F16) return 2 * n;
    return n / 32 * (matrix == KERN_Q8_0 ? 34 : 20);
}

static size_t add(struct tensor *list, size_t n, const char *name, int layer, int rows, int cols,
                  float gain) {
    struct tensor *t = &list[n];
    memset(t, 0, sizeof *t);
    if (layer >= 0) snprintf(t->name, sizeof t->name, "blk.%d.%s", layer, name);
    else snprintf(t->name, sizeof t->name, "%s", name);
    t->rows = rows;
    t->cols = cols;
    t->scale = rows ? gain / sqrtf((float)cols) : 0;
    t->draw = n;
    return n + 1;
}

enum { TENSORS_A_LAYER = 9, MAX_LAYERS = 64, MAX_TENSORS = 3 + TENSORS_A_LAYER * MAX_LAYERS };

static size_t list_tensors(struct tensor *list, const struct tiny_options *o) {
    size_t n = 0;
    int q = o->n_heads * o->head_dim, kv = o->n_kv_heads * o->head_dim;
    n = add(list, n, "token_embd.weight", -1, TINY_VOCAB, o->hidden, o->tied ? o->head_scale : 8);
    n = add(list, n, "output_norm.weight", -1, 0, o->hidden, 0);
    if (!o->tied) n = add(list, n, "output.weight", -1, TINY_VOCAB, o->hidden, o->head_scale);
    for (int l = 0; l < o->n_layers; l++) {
        n = add(list, n, "attn_norm.weight", l, 0, o->hidden, 0);
        n = add(list, n, "attn_q.weight", l, q, o->hidden, 2);
        n = add(list, n, "attn_k.weight", l, kv, o->hidden, 2);
        n = add(list, n, "attn_v.weight", l, kv, o->hidden, 1);
        n = add(list, n, "attn_output.weight", l, o->hidden, q, 1);
        n = add(list, n, "ffn_norm.weight", l, 0, o->hidden, 0);
        n = add(list, n, "ffn_gate.weight", l, o->ffn, o->hidden, 1);
        n = add(list, n, "ffn_up.weight", l, o->ffn, o->hidden, 1);
        n = add(list, n, "ffn_down.weight", l, o->hidden, o->ffn, 1);
    }
    return n;
}

static void pad(struct strbuf *b, size_t start) {
    while ((b->n - start) % ALIGNMENT) strbuf_append_char(b, 0);
}

/* ---- Files ---- */

static void put_header(struct strbuf *b, size_t n_tensors, size_t n_keys) {
    strbuf_append(b, "GGUF", 4);
    put_u32(b, 3);
    put_u64(b, n_tensors);
    put_u64(b, n_keys);
}

static void put_config(struct strbuf *b, const struct tiny_options *o, const char *name) {
    key_str(b, "general.architecture", "llama");
    key_str(b, "general.name", name);
    key_u32(b, "general.alignment", ALIGNMENT);
    key_u32(b, "llama.block_count", (uint32_t)o->n_layers);
    key_u32(b, "llama.context_length", (uint32_t)o->context);
    key_u32(b, "llama.embedding_length", (uint32_t)o->hidden);
    key_u32(b, "llama.feed_forward_length", (uint32_t)o->ffn);
    key_u32(b, "llama.attention.head_count", (uint32_t)o->n_heads);
    key_u32(b, "llama.attention.head_count_kv", (uint32_t)o->n_kv_heads);
    key_u32(b, "llama.attention.key_length", (uint32_t)o->head_dim);
    key_u32(b, "llama.attention.value_length", (uint32_t)o->head_dim);
    key_f32(b, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    key_f32(b, "llama.rope.freq_base", 10000);
}
enum { N_CONFIG_KEYS = 13 };

/* The tensor list and the data behind it; the file began at `start`. */
static void put_tensors(struct strbuf *b, size_t start, const struct tensor *list, size_t n,
                        const struct tiny_options *o) {
    size_t offset = 0;
    for (size_t i = 0; i < n; i++) {
        put_name(b, list[i].name);
        put_u32(b, list[i].rows ? 2 : 1);
        put_u64(b, (uint64_t)list[i].cols);
        if (list[i].rows) put_u64(b, (uint64_t)list[i].rows);
        put_u32(b, (uint32_t)(list[i].rows ? ggml_number(o->dtype) : 0));
        put_u64(b, offset);
        offset += (tensor_bytes(&list[i], o->dtype) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    }
    pad(b, start);
    for (size_t i = 0; i < n; i++) {
        put_tensor(b, &list[i], o);
        pad(b, start);
    }
    assert_false(b->failed);
}

void tiny_model_bytes(const struct tiny_options *o, struct strbuf *b) {
    static struct tensor list[MAX_TENSORS];
    assert_in_range(o->n_layers, 1, MAX_LAYERS);
    size_t n = list_tensors(list, o), start = b->n;
    put_header(b, n, N_CONFIG_KEYS + N_VOCABULARY_KEYS);
    put_config(b, o, "tiny");
    put_vocabulary(b, o);
    put_tensors(b, start, list, n, o);
}

/* ---- Drafts ---- */

/* The draft's tensors out of the target's list. Returns their number; *embedding stays where the
 * target's list has it. */
static size_t list_draft_tensors(struct tensor *list, const struct tiny_options *target,
                                 const struct tiny_draft *d, struct tensor *embedding) {
    static struct tensor whole[MAX_TENSORS];
    struct tiny_options o = *target;
    o.n_layers = d->n_layers; /* layers come last: the numbers of the first ones stay */
    size_t n_whole = list_tensors(whole, &o), n = 0, first_layer = o.tied ? 2 : 3;
    *embedding = whole[0];
    if (!d->borrow_embedding) list[n++] = whole[0];
    list[n++] = whole[1];
    if (d->own_head || (!o.tied && !d->borrow_embedding)) {
        struct tensor head = whole[o.tied ? 0 : 2];
        snprintf(head.name, sizeof head.name, "output.weight");
        if (d->head_ids) {
            head.rows = d->n_head_ids;
            head.row_ids = d->head_ids;
        }
        list[n++] = head;
    }
    for (size_t i = first_layer; i < n_whole; i++) {
        list[n] = whole[i];
        if (list[n].rows) list[n].noise = d->noise;
        list[n++].noise_seed = d->seed;
    }
    return n;
}

static void put_draft_keys(struct strbuf *b, const struct tiny_options *target,
                           const struct tiny_draft *d, const struct tensor *embedding) {
    if (d->borrow_embedding) {
        struct strbuf raw = {0};
        char hash[17];
        put_tensor(&raw, embedding, target);
        snprintf(hash, sizeof hash, "%016llx", (unsigned long long)XXH3_64bits(raw.data, raw.n));
        strbuf_deinit(&raw);
        key_u32(b, "llama.vocab_size", TINY_VOCAB);
        put_name(b, "tandem.draft.borrow_embedding");
        put_u32(b, FILE_BOOL);
        strbuf_append_char(b, 1);
        key_str(b, "tandem.draft.embedding_xxh3", hash);
    } else put_vocabulary(b, target);
    if (!d->head_ids) return;
    key_array(b, "tandem.draft.head_ids", FILE_U32, (uint64_t)d->n_head_ids);
    for (int i = 0; i < d->n_head_ids; i++) put_u32(b, (uint32_t)d->head_ids[i]);
}

void tiny_draft_bytes(const struct tiny_options *target, const struct tiny_draft *d,
                      struct strbuf *b) {
    static struct tensor list[MAX_TENSORS + 1];
    struct tensor embedding;
    struct tiny_options o = *target;
    assert_in_range(d->n_layers, 1, target->n_layers);
    assert_in_range(target->n_layers, 1, MAX_LAYERS);
    o.n_layers = d->n_layers;
    if (d->context) o.context = d->context;
    size_t n = list_draft_tensors(list, target, d, &embedding), start = b->n;
    size_t keys = (d->borrow_embedding ? 3 : N_VOCABULARY_KEYS) + (d->head_ids ? 1 : 0);
    put_header(b, n, N_CONFIG_KEYS + keys);
    put_config(b, &o, "tiny draft");
    put_draft_keys(b, target, d, &embedding);
    put_tensors(b, start, list, n, &o);
}

/* ---- On disk ---- */

static void write_new_file(char *path, struct strbuf *b) {
    int fd = mkstemps(path, 5);
    FILE *f = fd >= 0 ? fdopen(fd, "wb") : NULL;
    if (!f) fail_msg("cannot make %s", path);
    assert_int_equal(fwrite(b->data, 1, b->n, f), b->n);
    assert_int_equal(fclose(f), 0);
    strbuf_deinit(b);
}

const char *tiny_model_file(const struct tiny_options *o) {
    static char path[] = "/tmp/tandem-tiny-XXXXXX.gguf";
    memcpy(path, "/tmp/tandem-tiny-XXXXXX.gguf", sizeof path);
    struct strbuf b = {0};
    tiny_model_bytes(o, &b);
    write_new_file(path, &b);
    return path;
}

const char *tiny_draft_file(const struct tiny_options *target, const struct tiny_draft *d) {
    static char path[] = "/tmp/tandem-tiny-draft-XXXXXX.gguf";
    memcpy(path, "/tmp/tandem-tiny-draft-XXXXXX.gguf", sizeof path);
    struct strbuf b = {0};
    tiny_draft_bytes(target, d, &b);
    write_new_file(path, &b);
    return path;
}
