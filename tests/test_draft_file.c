/* Drafts that borrow from their target (docs/draft-format.md). Keys: one is changed at a time in a
 * header and the error must name it. Files: a tiny draft is broken against its target in one place.
 * Bits: a reduced head's columns equal the whole head's, and a draft that borrows has the logits of
 * the same draft stored whole. Last, how often the tests' tiny pairs agree. */
#include "tests/harness.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/err.h"
#include "base/rng.h"
#include "model/source.h"
#include "tests/gguf_builder.h"
#include "tests/runner.h"
#include "tests/tiny_model.h"

#define BORROW "tandem.draft.borrow_embedding"
#define HASH "tandem.draft.embedding_xxh3"
#define IDS "tandem.draft.head_ids"

/* ---- Keys ---- */

enum { ABSENT = -1, VOCAB = 10, MAX_IDS = 12 };

/* A header of a llama; no tensors but perhaps an embedding. */
struct header {
    int borrow;    /* value of the bool; ABSENT: no key; 2: a u32 instead */
    int vocab;     /* 0: no key */
    int embedding; /* 1: the tensor is there, 2: a head too */
    const char *hash;
    int ids_type; /* ABSENT: no key; GGUF_STRING: no array at all */
    int n_ids;
    int64_t ids[MAX_IDS];
};

static const char good_hash[] = "0123456789abcdef";

static void put_small_tensors(struct strbuf *b, int n) {
    static const char *const names[] = {"token_embd.weight", "output.weight"};
    const uint64_t dims[2] = {32, VOCAB};
    for (int i = 0; i < n; i++) put_tensor(b, names[i], 2, dims, 0, (uint64_t)i * 32 * VOCAB * 4);
    put_padding(b, 32);
    put_zeros(b, (size_t)n * 32 * VOCAB * 4);
}

static int read_header(const struct header *h, struct model_config *c, struct err *e) {
    struct strbuf b = {0};
    struct gguf *g;
    int ids = h->ids_type != ABSENT;
    put_header(&b, 3, (uint64_t)h->embedding,
               (uint64_t)(7 + (h->borrow != ABSENT) + (h->vocab > 0) + (h->hash != NULL) + ids));
    put_key_str(&b, "general.architecture", "llama");
    put_key_u32(&b, "llama.block_count", 2);
    put_key_u32(&b, "llama.embedding_length", 32);
    put_key_u32(&b, "llama.feed_forward_length", 32);
    put_key_u32(&b, "llama.attention.head_count", 2);
    put_key_u32(&b, "llama.context_length", 64);
    put_key_f32(&b, "llama.attention.layer_norm_rms_epsilon", 1e-6f);
    if (h->borrow == 2) put_key_u32(&b, BORROW, 1);
    else if (h->borrow != ABSENT) {
        put_key(&b, BORROW, GGUF_BOOL);
        put_little(&b, (uint64_t)h->borrow, 1);
    }
    if (h->vocab) put_key_u32(&b, "llama.vocab_size", (uint32_t)h->vocab);
    if (h->hash) put_key_str(&b, HASH, h->hash);
    if (ids && h->ids_type == GGUF_STRING) put_key_str(&b, IDS, "1, 2");
    else if (ids) {
        put_array(&b, IDS, (uint32_t)h->ids_type, (uint64_t)h->n_ids);
        for (int i = 0; i < h->n_ids; i++)
            put_little(&b, (uint64_t)h->ids[i], h->ids_type == GGUF_U64 ? 8 : 4);
    }
    put_small_tensors(&b, h->embedding);
    assert_ok(gguf_open_bytes(&g, (const uint8_t *)b.data, b.n, e), *e);
    int rc = model_config_from_gguf(c, g, e);
    gguf_close(g);
    strbuf_deinit(&b);
    return rc;
}

static const struct {
    struct header h;
    int code;
    const char *text;
} key_lies[] = {
    {{2, VOCAB, 0, good_hash, ABSENT, 0, {0}}, E_FORMAT, BORROW ": of type u32, expected a bool"},
    {{1, 0, 0, good_hash, ABSENT, 0, {0}}, E_FORMAT, "llama.vocab_size is missing"},
    {{1, VOCAB, 0, NULL, ABSENT, 0, {0}}, E_FORMAT, HASH " is missing"},
    {{1, VOCAB, 1, good_hash, ABSENT, 0, {0}}, E_FORMAT, "token_embd.weight is there, and"},
    {{0, VOCAB, 1, good_hash, ABSENT, 0, {0}}, E_FORMAT, HASH " without " BORROW},
    {{ABSENT, VOCAB, 1, good_hash, ABSENT, 0, {0}}, E_FORMAT, HASH " without " BORROW},
    {{1, VOCAB, 0, "", ABSENT, 0, {0}}, E_FORMAT, HASH ": \"\" is not 16"},
    {{1, VOCAB, 0, "0123456789abcde", ABSENT, 0, {0}}, E_FORMAT, "\"0123456789abcde\" is not 16"},
    {{1, VOCAB, 0, "0123456789abcdef0", ABSENT, 0, {0}}, E_FORMAT, "abcdef0\" is not 16"},
    {{1, VOCAB, 0, "0123456789ABCDEF", ABSENT, 0, {0}}, E_FORMAT, "lower-case"},
    {{1, VOCAB, 0, "0123456789abcdeg", ABSENT, 0, {0}}, E_FORMAT, "abcdeg\" is not 16"},
    {{1, VOCAB, 0, good_hash, GGUF_STRING, 0, {0}}, E_FORMAT, IDS ": of type string"},
    {{1, VOCAB, 0, good_hash, GGUF_U64, 1, {1}}, E_FORMAT, IDS ": elements are neither u32 nor"},
    {{1, VOCAB, 0, good_hash, GGUF_F32, 1, {1}}, E_FORMAT, IDS ": elements are neither u32 nor"},
    {{1, VOCAB, 0, good_hash, GGUF_U32, 0, {0}}, E_FORMAT, IDS ": 0 ids, allowed is 1..10"},
    {{1, VOCAB, 0, good_hash, GGUF_U32, 11, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10}},
     E_FORMAT,
     IDS ": 11 ids, allowed is 1..10"},
    {{1, VOCAB, 0, good_hash, GGUF_U32, 3, {1, 3, 2}}, E_FORMAT, IDS ": element 2 is 2 after 3"},
    {{1, VOCAB, 0, good_hash, GGUF_I32, 3, {1, 3, 3}}, E_FORMAT, IDS ": element 2 is 3 after 3"},
    {{1, VOCAB, 0, good_hash, GGUF_I32, 2, {1, 10}},
     E_FORMAT,
     IDS ": element 1 is 10, outside 0..9"},
    {{1, VOCAB, 0, good_hash, GGUF_I32, 2, {-1, 1}},
     E_FORMAT,
     IDS ": element 0 is -1, outside 0..9"},
    {{1, VOCAB, 0, good_hash, GGUF_U32, 2, {0, 4294967295}},
     E_FORMAT,
     IDS ": element 1 is 4294967295, outside 0..9"},
    {{ABSENT, VOCAB, 1, NULL, GGUF_U32, 2, {5, 4}}, E_FORMAT, IDS ": element 1 is 4 after 5"},
};

static void test_draft_file_names_every_lie(void) {
    for (size_t i = 0; i < sizeof key_lies / sizeof *key_lies; i++) {
        struct model_config c;
        struct err e = {0};
        int rc = read_header(&key_lies[i].h, &c, &e);
        if (rc != key_lies[i].code || !strstr(e.message, key_lies[i].text))
            fail_msg("lie %zu: %s \"%s\", wanted \"%s\"", i, err_name(rc), e.message,
                     key_lies[i].text);
    }
}

/* What good keys turn into, and that files without them stay what they were. */
static void test_draft_file_config(void) {
    static const struct {
        struct header h;
        bool borrows_embedding, borrows_head, tied;
        int n_head;
    } cases[] = {
        {{ABSENT, VOCAB, 1, NULL, ABSENT, 0, {0}}, false, false, true, VOCAB},
        {{0, VOCAB, 2, NULL, ABSENT, 0, {0}}, false, false, false, VOCAB},
        {{1, VOCAB, 0, good_hash, ABSENT, 0, {0}}, true, true, false, VOCAB},
        {{1, VOCAB, 0, good_hash, GGUF_U32, 3, {0, 4, 9}}, true, true, false, 3},
        {{1, VOCAB, 0, good_hash, GGUF_I32, 1, {9}}, true, true, false, 1},
        {{ABSENT, VOCAB, 1, NULL, GGUF_I32, 2, {0, 1}}, false, false, true, 2},
        {{ABSENT, 0, 2, NULL, GGUF_U32, 2, {0, 1}}, false, false, false, 2},
        {{1, VOCAB, 0, good_hash, GGUF_U32, 10, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}},
         true,
         true,
         false,
         VOCAB},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct model_config c;
        struct err e = {0};
        assert_ok(read_header(&cases[i].h, &c, &e), e);
        assert_int_equal(c.borrows_embedding, cases[i].borrows_embedding);
        assert_int_equal(c.borrows_head, cases[i].borrows_head);
        assert_int_equal(c.tied, cases[i].tied);
        assert_int_equal(c.vocab, VOCAB);
        assert_int_equal(c.n_head, cases[i].n_head);
    }
}

/* ---- Files ---- */

/* Path of a new file with these bytes; the caller unlinks it. */
static const char *write_bytes(const struct strbuf *b) {
    static char path[] = "/tmp/tandem-draft-XXXXXX.gguf";
    memcpy(path, "/tmp/tandem-draft-XXXXXX.gguf", sizeof path);
    int fd = mkstemps(path, 5);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, b->data, b->n), b->n);
    close(fd);
    return path;
}

/* The first place of `text` in the file, which must be there. */
static char *find_bytes(struct strbuf *b, const char *text) {
    char *at = memmem(b->data, b->n, text, strlen(text));
    if (!at) fail_msg("no \"%s\" in the file", text);
    return at;
}

static struct model_source *open_source(const char *path) {
    struct model_source *s;
    struct err e = {0};
    assert_ok(model_source_open(&s, path, &e), e);
    unlink(path);
    return s;
}

static const int32_t some_ids[] = {0, 3, 32, 97, 101, 116, 200, 256, 257, 258, 270, 271};
enum { N_SOME = sizeof some_ids / sizeof *some_ids };

static void test_draft_file_source(void) {
    struct tiny_options t;
    struct tiny_draft d;
    tiny_model_default(&t);
    tiny_draft_default(&d, &t);
    d.borrow_embedding = true;
    d.head_ids = some_ids;
    d.n_head_ids = N_SOME;
    d.n_layers = 2;
    struct tensor_view v;
    struct model_source *s = open_source(tiny_draft_file(&t, &d));
    assert_int_equal(model_source_find(s, TENSOR_TOKEN_EMBD, 0, &v, NULL), E_NOT_FOUND);
    assert_int_equal(model_source_find(s, TENSOR_OUTPUT, 0, &v, NULL), E_NOT_FOUND);
    assert_memory_equal(model_source_head_ids(s), some_ids, sizeof some_ids);
    assert_true(model_source_embedding_hash(s) != 0);
    assert_int_equal(model_source_n_tensors(s), 1 + 2 * 9);
    /* Who takes it for a whole model asks for the tokenizer first. */
    struct tokenizer *none;
    struct err e = {0};
    assert_int_equal(tokenizer_open_gguf(&none, model_source_gguf(s), &e), E_NOT_FOUND);
    assert_non_null(strstr(e.message, "it is a draft that borrows its target's"));
    model_source_close(s);

    d.own_head = true;
    s = open_source(tiny_draft_file(&t, &d));
    assert_ok(model_source_find(s, TENSOR_OUTPUT, 0, &v, &e), e);
    assert_int_equal(v.rows, N_SOME);
    model_source_close(s);

    s = open_source(tiny_model_file(&t));
    assert_null(model_source_head_ids(s));
    assert_int_equal(model_source_embedding_hash(s), 0);
    model_source_close(s);
}

/* Tensors that do not fit the keys. */
static void test_draft_file_tensors(void) {
    static const struct {
        bool borrow, own_head;
        const char *from,
            *to; /* bytes of the file, of one length; NULL: rows of the head less one */
        int code;
        const char *text;
    } lies[] = {
        {true, true, NULL, NULL, E_FORMAT,
         "tensor output.weight has the shape [11 x 64]; by the config it is [12 x 64]"},
        /* The head under another name: left over. */
        {true, true, "output.weight", "0utput.weight", E_UNSUPPORTED, "0utput.weight has no place"},
        /* The embedding is neither there nor borrowed. */
        {false, false, "token_embd.weight", "token_embd.veight", E_FORMAT,
         "tensor token_embd.weight is missing"},
        {true, false, "blk.1.ffn_up.weight", "blk.1.ffn_up.veight", E_FORMAT,
         "tensor blk.1.ffn_up.weight is missing"},
    };
    struct tiny_options t;
    struct tiny_draft d;
    tiny_model_default(&t);
    t.tied = true;
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        struct strbuf b = {0};
        struct model_source *s;
        struct err e = {0};
        tiny_draft_default(&d, &t);
        d.borrow_embedding = lies[i].borrow;
        d.own_head = lies[i].own_head;
        d.head_ids = some_ids;
        d.n_head_ids = N_SOME;
        tiny_draft_bytes(&t, &d, &b);
        if (!lies[i].from) { /* behind the name: number of dimensions, columns, rows */
            char *at = find_bytes(&b, "output.weight") + 13 + 4 + 8;
            assert_int_equal(*at, N_SOME);
            *at = N_SOME - 1;
        } else memcpy(find_bytes(&b, lies[i].from), lies[i].to, strlen(lies[i].to));
        const char *path = write_bytes(&b);
        int rc = model_source_open(&s, path, &e);
        unlink(path);
        strbuf_deinit(&b);
        if (rc != lies[i].code || !strstr(e.message, lies[i].text))
            fail_msg("lie %zu: %s \"%s\", wanted \"%s\"", i, err_name(rc), e.message, lies[i].text);
    }
}

/* ---- A draft and its target ---- */

static const struct model_caps small_caps = {
    .max_rows = 8, .max_seqs = 1, .max_blocks = 4, .max_logits = 8};

struct pair {
    struct kern *k;
    struct model_source *target_src, *draft_src;
    struct model *target;
};

static void open_pair(struct pair *p, const struct tiny_options *t, const char *draft) {
    struct err e = {0};
    struct kern_options o = {.n_threads = 1};
    assert_ok(kern_cpu_open(&p->k, &o, &e), e);
    p->target_src = open_source(tiny_model_file(t));
    p->draft_src = open_source(draft);
    assert_ok(model_open(&p->target, p->target_src, NULL, p->k, &small_caps, NULL, NULL, &e), e);
}

static void close_pair(struct pair *p) {
    model_close(p->target);
    model_source_close(p->target_src);
    model_source_close(p->draft_src);
    p->k->ops->close(p->k);
}

static void expect_open(struct pair *p, const struct model_borrow *borrow, const char *text) {
    struct model *m = NULL;
    struct err e = {0};
    int rc = model_open(&m, p->draft_src, borrow, p->k, &small_caps, NULL, NULL, &e);
    if (rc != E_INVALID || !strstr(e.message, text))
        fail_msg("%s \"%s\", wanted \"%s\"", err_name(rc), e.message, text);
    assert_null(m);
}

static void test_draft_file_meets_its_target(void) {
    struct tiny_options t, other;
    struct tiny_draft d;
    struct pair p;
    size_t bytes;
    struct err e = {0};
    tiny_model_default(&t);
    tiny_draft_default(&d, &t);
    d.borrow_embedding = true;
    open_pair(&p, &t, tiny_draft_file(&t, &d));
    expect_open(&p, NULL, "is a draft that borrows its target's embedding");
    assert_int_equal(model_weight_bytes(p.draft_src, NULL, p.k, &bytes, &e), E_INVALID);
    assert_non_null(strstr(e.message, "give it as the draft of that target"));
    /* Its own target: a draft that borrows too. */
    expect_open(&p, &(struct model_borrow){p.target, p.draft_src}, "is itself a draft");
    close_pair(&p);

    /* Another training of one shape: told by the hash, both values in the text. */
    other = t;
    other.seed++;
    open_pair(&p, &other, tiny_draft_file(&t, &d));
    struct model_borrow borrow = {p.target, p.target_src};
    expect_open(&p, &borrow, "the target's token_embd.weight has ");
    assert_ok(model_weight_bytes(p.draft_src, &borrow, p.k, &bytes, &e), e); /* headers agree */
    close_pair(&p);

    other = t;
    other.hidden = 32;
    other.n_heads = 2;
    other.n_kv_heads = 1;
    open_pair(&p, &other, tiny_draft_file(&t, &d));
    borrow = (struct model_borrow){p.target, p.target_src};
    expect_open(&p, &borrow,
                "hidden size: the draft borrows the target's embedding and has 64, "
                "the target 32");
    assert_int_equal(model_weight_bytes(p.draft_src, &borrow, p.k, &bytes, &e), E_INVALID);
    close_pair(&p);

    /* A vocabulary of 273 by the key. */
    struct strbuf b = {0};
    tiny_draft_bytes(&t, &d, &b);
    char *at = find_bytes(&b, "llama.vocab_size") + 16 + 4;
    assert_memory_equal(at, "\20\1\0\0", 4);
    *at = 17;
    open_pair(&p, &t, write_bytes(&b));
    borrow = (struct model_borrow){p.target, p.target_src};
    expect_open(&p, &borrow, "and has 273 tokens, the target 272");
    close_pair(&p);
    strbuf_deinit(&b);
}

/* What is borrowed is shared and costs nothing; a reduced head costs its rows. */
static void test_draft_file_bytes(void) {
    struct tiny_options t;
    struct tiny_draft d;
    struct pair p;
    struct model *m;
    struct err e = {0};
    size_t whole, shared, reduced;
    tiny_model_default(&t);
    tiny_draft_default(&d, &t);
    open_pair(&p, &t, tiny_draft_file(&t, &d));
    assert_ok(model_weight_bytes(p.draft_src, NULL, p.k, &whole, &e), e);
    size_t embedding = model_embedding(p.target)->bytes, head = model_head(p.target)->bytes;
    close_pair(&p);

    d.borrow_embedding = true;
    open_pair(&p, &t, tiny_draft_file(&t, &d));
    struct model_borrow borrow = {p.target, p.target_src};
    assert_ok(model_weight_bytes(p.draft_src, &borrow, p.k, &shared, &e), e);
    assert_int_equal(shared, whole - embedding - head);
    assert_ok(model_open(&m, p.draft_src, &borrow, p.k, &small_caps, NULL, NULL, &e), e);
    assert_ptr_equal(model_embedding(m)->data, model_embedding(p.target)->data);
    assert_ptr_equal(model_head(m)->data, model_head(p.target)->data);
    assert_null(model_head_ids(m));
    assert_int_equal(model_n_head(m), TINY_VOCAB);
    model_close(m);
    close_pair(&p);

    d.head_ids = some_ids;
    d.n_head_ids = N_SOME;
    open_pair(&p, &t, tiny_draft_file(&t, &d));
    borrow = (struct model_borrow){p.target, p.target_src};
    assert_ok(model_weight_bytes(p.draft_src, &borrow, p.k, &reduced, &e), e);
    assert_true(reduced > shared && reduced < shared + head);
    /* From headers, as `plan` has it: the target is not open. */
    struct model_borrow planned = {NULL, p.target_src};
    size_t again;
    assert_ok(model_weight_bytes(p.draft_src, &planned, p.k, &again, &e), e);
    assert_int_equal(again, reduced);
    assert_ok(model_open(&m, p.draft_src, &borrow, p.k, &small_caps, NULL, NULL, &e), e);
    assert_ptr_equal(model_embedding(m)->data, model_embedding(p.target)->data);
    assert_int_equal(model_n_head(m), N_SOME);
    assert_memory_equal(model_head_ids(m), some_ids, sizeof some_ids);
    assert_int_equal(model_head(m)->rows, N_SOME);
    model_close(m);
    close_pair(&p);
}

/* ---- Bits ---- */

enum { N_ROWS = 80 }; /* more than a page */

static void make_ids(int32_t *ids, int n) {
    for (int i = 0; i < n; i++)
        ids[i] = (int32_t)(rng_u32(5, (uint64_t)i, RNG_TEST, 0) % TINY_IM_START);
}

/* Logits [N_ROWS][TINY_VOCAB] of the first rows of a text, some prompt rows, some generated; the
 * file is gone afterwards. */
static float *logits_of(const char *path, const char *target, enum kern_precision precision,
                        const char *isa) {
    struct runner_options o = {.path = path,
                               .target_path = target,
                               .precision = precision,
                               .isa = isa,
                               .n_threads = 2,
                               .max_tokens = 128,
                               .n_seqs = 1,
                               .max_rows = N_ROWS,
                               .kv = precision == KERN_REFERENCE ? KERN_F32 : KERN_F16};
    int32_t ids[N_ROWS];
    float *z = calloc(N_ROWS * TINY_VOCAB, sizeof *z);
    assert_non_null(z);
    make_ids(ids, N_ROWS);
    struct runner *r = runner_open(&o);
    struct runner_piece prompt = {0, ids, 70, true}, rest = {0, ids + 70, N_ROWS - 70, false};
    runner_pass(r, &prompt, 1, z);
    runner_pass(r, &rest, 1, z + 70 * TINY_VOCAB);
    runner_close(r);
    unlink(path);
    return z;
}

/* A draft stored whole is the measure. Borrowing everything, borrowing the rows of a reduced head,
 * an own reduced head and a reduced tied one: column i equals the measure's column ids[i], bit for
 * bit, on every type that a target's head may have. */
static void check_bits(const struct tiny_options *t, enum kern_precision precision,
                       const char *isa) {
    static const struct {
        bool borrow, reduced, own_head;
    } kinds[] = {{true, false, false}, {true, true, false}, {true, true, true},
                 {true, false, true},  {false, true, true}, {false, true, false}};
    struct tiny_draft d;
    tiny_draft_default(&d, t);
    d.n_layers = 2;
    char target[128];
    snprintf(target, sizeof target, "%s", tiny_model_file(t));
    float *whole = logits_of(tiny_draft_file(t, &d), NULL, precision, isa);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        d.borrow_embedding = kinds[i].borrow;
        d.head_ids = kinds[i].reduced ? some_ids : NULL;
        d.n_head_ids = kinds[i].reduced ? N_SOME : 0;
        d.own_head = kinds[i].own_head;
        float *z = logits_of(tiny_draft_file(t, &d), target, precision, isa);
        int n = kinds[i].reduced ? N_SOME : TINY_VOCAB;
        for (int row = 0; row < N_ROWS; row++)
            for (int c = 0; c < n; c++) {
                int id = kinds[i].reduced ? some_ids[c] : c;
                const float *a = z + row * TINY_VOCAB + c, *b = whole + row * TINY_VOCAB + id;
                if (memcmp(a, b, sizeof *a) != 0)
                    fail_msg("kind %zu, row %d, token %d: %a, stored whole %a", i, row, id,
                             (double)*a, (double)*b);
            }
        free(z);
    }
    /* The measure can tell: another draft differs. */
    tiny_draft_default(&d, t);
    float *z = logits_of(tiny_draft_file(t, &d), NULL, precision, isa);
    assert_true(memcmp(z, whole, N_ROWS * TINY_VOCAB * sizeof *z) != 0);
    free(z);
    free(whole);
    unlink(target);
}

static void test_draft_file_bits(void) {
    static const enum kern_dtype types[] = {KERN_F32, KERN_F16, KERN_Q8_0, KERN_Q4_1};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        for (int tied = 0; tied < 2; tied++) {
            struct tiny_options t;
            tiny_model_default(&t);
            t.dtype = types[i];
            t.tied = tied;
            check_bits(&t, KERN_FAST, NULL);
            if (i % 2 == 0) check_bits(&t, KERN_REFERENCE, NULL);
        }
}

/* Each instruction set has its own tails where rows are no multiple of its tiles. */
static void test_draft_file_bits_everywhere(void) {
    static const char *const isas[] = {"plain", "avx2", "avxvnni", "avx512", "amx"};
    for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
        struct kern *k;
        struct kern_options o = {.n_threads = 1, .isa = isas[i]};
        if (kern_cpu_open(&k, &o, NULL) != 0) {
            fprintf(stderr, "  %s does not run here\n", isas[i]);
            continue;
        }
        k->ops->close(k);
        struct tiny_options t;
        tiny_model_default(&t);
        t.dtype = KERN_Q8_0;
        t.tied = true; /* as the default target's head is */
        check_bits(&t, KERN_FAST, isas[i]);
    }
}

/* ---- How often tiny pairs agree ---- */

static int argmax(const float *z) {
    int best = 0;
    for (int i = 1; i < TINY_VOCAB; i++)
        if (z[i] > z[best]) best = i;
    return best;
}

/* Share of equal greedy choices over greedy answers of the target, as rounds would meet them. */
static double agreement(const struct tiny_options *t, const struct tiny_draft *d) {
    enum { PROMPTS = 8, PROMPT = 20, ANSWER = 40 };
    struct runner_options o = {.precision = KERN_FAST,
                               .n_threads = 1,
                               .max_tokens = 64,
                               .n_seqs = PROMPTS,
                               .max_rows = PROMPT,
                               .kv = KERN_F16};
    struct runner *r[2];
    static float z[2][PROMPT * TINY_VOCAB];
    int same = 0;
    for (int i = 0; i < 2; i++) {
        o.path = i ? tiny_draft_file(t, d) : tiny_model_file(t);
        r[i] = runner_open(&o);
        unlink(o.path);
    }
    for (int seq = 0; seq < PROMPTS; seq++) {
        int32_t ids[PROMPT];
        for (int i = 0; i < PROMPT; i++)
            ids[i] = (int32_t)(rng_u32((uint64_t)seq, (uint64_t)i, RNG_TEST, 1) % TINY_IM_START);
        struct runner_piece piece = {seq, ids, PROMPT, true};
        for (int n = 0; n < ANSWER; n++) {
            int32_t choice[2];
            for (int i = 0; i < 2; i++) {
                runner_pass_last(r[i], &piece, 1, z[i], 1);
                choice[i] = argmax(z[i]);
            }
            same += choice[0] == choice[1];
            ids[0] = choice[0];
            piece = (struct runner_piece){seq, ids, 1, false};
        }
    }
    for (int i = 0; i < 2; i++) runner_close(r[i]);
    return (double)same / (PROMPTS * ANSWER);
}

static void test_draft_file_agreement(void) {
    struct tiny_options t;
    struct tiny_draft d;
    for (uint64_t seed = 1; seed <= 3; seed++) {
        tiny_model_default(&t);
        t.seed = seed;
        tiny_draft_default(&d, &t);
        double with_noise = agreement(&t, &d);
        d.noise = 0;
        double same = agreement(&t, &d);
        d.n_layers--;
        double fewer = agreement(&t, &d);
        fprintf(stderr, "  seed %llu: noise %.2f, one layer fewer %.2f, the same model %.2f\n",
                (unsigned long long)seed, with_noise, fewer, same);
        if (!(with_noise >= 0.4 && with_noise <= 0.95))
            fail_msg("the default draft agrees in %.2f", with_noise);
        assert_true(same == 1);
        assert_true(fewer < 1);
    }
}

const struct test tests[] = {
    {"draft_file_names_every_lie", TEST_QUICK, 5000, test_draft_file_names_every_lie},
    {"draft_file_config", TEST_QUICK, 5000, test_draft_file_config},
    {"draft_file_source", TEST_QUICK, 5000, test_draft_file_source},
    {"draft_file_tensors", TEST_QUICK, 5000, test_draft_file_tensors},
    {"draft_file_meets_its_target", TEST_QUICK, 10000, test_draft_file_meets_its_target},
    {"draft_file_bytes", TEST_QUICK, 10000, test_draft_file_bytes},
    {"draft_file_bits", TEST_QUICK, 60000, test_draft_file_bits},
    {"draft_file_bits_everywhere", TEST_QUICK, 60000, test_draft_file_bits_everywhere},
    {"draft_file_agreement", TEST_QUICK, 60000, test_draft_file_agreement},
    {0},
};
