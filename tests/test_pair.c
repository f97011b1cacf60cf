/* model_check_pair: two vocabularies of a few tokens, written as headers, that differ in one thing;
 * the error must name the id and both values. What only pads, and what a draft has no use for
 * (merges, the pre-tokenizer), must not count. Then pairs of tiny models, borrowing and not. */
#include "tests/harness.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/err.h"
#include "model/model.h"
#include "model/source.h"
#include "tests/fail_alloc.h"
#include "tests/gguf_builder.h"
#include "tests/tiny_model.h"

enum { MAX_TOKENS = 8, NORMAL = 1, CONTROL = 3, USER = 4, UNUSED = 5 };

/* A model of no weights: what its header says of tokens. */
struct words {
    const char *text[MAX_TOKENS]; /* up to the first NULL */
    int type[MAX_TOKENS];
    int bos, eos, eot; /* -1: no key */
    int vocab;
    bool spm;
    const char *pre;   /* of byte-level BPE */
    const char *merge; /* NULL: none */
    int n_head;        /* 0: no list of ids; -1: of token 5 alone */
};

/* The target of every case. */
#define BASE_TEXT                                                                                  \
    { "a", "b", "\xc3\xb0", "ab", "<|im_start|>", "<|im_end|>" }
#define BASE_TYPE                                                                                  \
    { NORMAL, NORMAL, NORMAL, NORMAL, CONTROL, CONTROL }
static const struct words base = {BASE_TEXT, BASE_TYPE, 4, 5, -1, 6, false, "smollm", "a b", 0};

static const char *write_words(const struct words *w) {
    static char path[] = "/tmp/tandem-words-XXXXXX.gguf";
    memcpy(path, "/tmp/tandem-words-XXXXXX.gguf", sizeof path);
    struct strbuf b = {0};
    uint64_t n = 0;
    while (n < MAX_TOKENS && w->text[n]) n++;
    int keys = 12 + (w->bos >= 0) + (w->eos >= 0) + (w->eot >= 0) + (w->n_head != 0);
    put_header(&b, 3, 0, (uint64_t)keys);
    put_key_str(&b, "general.architecture", "llama");
    put_key_u32(&b, "llama.block_count", 2);
    put_key_u32(&b, "llama.embedding_length", 32);
    put_key_u32(&b, "llama.feed_forward_length", 32);
    put_key_u32(&b, "llama.attention.head_count", 2);
    put_key_u32(&b, "llama.context_length", 64);
    put_key_f32(&b, "llama.attention.layer_norm_rms_epsilon", 1e-6f);
    put_key_u32(&b, "llama.vocab_size", (uint32_t)w->vocab);
    put_key_str(&b, "tokenizer.ggml.model", w->spm ? "llama" : "gpt2");
    put_array(&b, "tokenizer.ggml.tokens", GGUF_STRING, n);
    for (uint64_t i = 0; i < n; i++) put_str(&b, w->text[i]);
    put_array(&b, "tokenizer.ggml.token_type", GGUF_I32, n);
    for (uint64_t i = 0; i < n; i++) put_little(&b, (uint64_t)w->type[i], 4);
    if (w->spm) {
        put_array(&b, "tokenizer.ggml.scores", GGUF_F32, n);
        put_zeros(&b, 4 * n);
    } else {
        keys++;
        put_key_str(&b, "tokenizer.ggml.pre", w->pre);
        put_array(&b, "tokenizer.ggml.merges", GGUF_STRING, w->merge ? 1 : 0);
        if (w->merge) put_str(&b, w->merge);
    }
    if (w->bos >= 0) put_key_u32(&b, "tokenizer.ggml.bos_token_id", (uint32_t)w->bos);
    if (w->eos >= 0) put_key_u32(&b, "tokenizer.ggml.eos_token_id", (uint32_t)w->eos);
    if (w->eot >= 0) put_key_u32(&b, "tokenizer.ggml.eot_token_id", (uint32_t)w->eot);
    if (w->n_head) {
        int n_ids = w->n_head > 0 ? w->n_head : 1;
        put_array(&b, "tandem.draft.head_ids", GGUF_U32, (uint64_t)n_ids);
        for (int i = 0; i < n_ids; i++) put_little(&b, w->n_head > 0 ? (uint64_t)i : 5, 4);
    }
    b.data[16] = (char)keys;
    int fd = mkstemps(path, 5);
    assert_true(fd >= 0 && !b.failed);
    assert_int_equal(write(fd, b.data, b.n), b.n);
    close(fd);
    strbuf_deinit(&b);
    return path;
}

static struct model_source *open_source(const char *path) {
    struct model_source *s;
    struct err e = {0};
    assert_ok(model_source_plan_only(&s, path, &e), e);
    unlink(path);
    return s;
}

/* model_check_pair of two sources, which are closed; the target brings a tokenizer. */
static int check(struct model_source *target, struct model_source *draft, struct err *e) {
    struct tokenizer *t;
    assert_ok(tokenizer_open_gguf(&t, model_source_gguf(target), e), *e);
    int rc = model_check_pair(target, t, draft, e);
    tokenizer_close(t);
    model_source_close(target);
    model_source_close(draft);
    return rc;
}

static const struct {
    const char *what;
    struct words draft;
    const char *text; /* NULL: a pair */
} cases[] = {
    {"the same", {BASE_TEXT, BASE_TYPE, 4, 5, -1, 6, false, "smollm", "a b", 0}, NULL},
    {"other merges", {BASE_TEXT, BASE_TYPE, 4, 5, -1, 6, false, "smollm", NULL, 0}, NULL},
    {"another pattern", {BASE_TEXT, BASE_TYPE, 4, 5, -1, 6, false, "gpt-2", "a b", 0}, NULL},
    {"no bos, no eos", {BASE_TEXT, BASE_TYPE, -1, -1, -1, 6, false, "smollm", "a b", 0}, NULL},
    {"a padded head", {BASE_TEXT, BASE_TYPE, 4, 5, -1, 64, false, "smollm", "a b", 0}, NULL},
    {"a reduced head", {BASE_TEXT, BASE_TYPE, 4, 5, -1, 6, false, "smollm", "a b", 3}, NULL},
    {"padded entries",
     {{"a", "b", "\xc3\xb0", "ab", "<|im_start|>", "<|im_end|>", "[PAD6]", "[PAD7]"},
      {NORMAL, NORMAL, NORMAL, NORMAL, CONTROL, CONTROL, NORMAL, UNUSED},
      4,
      5,
      -1,
      8,
      false,
      "smollm",
      "a b",
      0},
     NULL},
    {"another text",
     {{"a", "c", "\xc3\xb0", "ab", "<|im_start|>", "<|im_end|>"},
      BASE_TYPE,
      4,
      5,
      -1,
      6,
      false,
      "smollm",
      NULL,
      0},
     "token 1 is 'b' (normal) in the target and 'c' (normal) in the draft"},
    {"another byte",
     {{"a", "b", "\xc3\xb1", "ab", "<|im_start|>", "<|im_end|>"},
      BASE_TYPE,
      4,
      5,
      -1,
      6,
      false,
      "smollm",
      "a b",
      0},
     "token 2 is '\\xf0' (normal) in the target and '\\xf1' (normal) in the draft"},
    {"a longer text",
     {{"a", "b", "\xc3\xb0", "abb", "<|im_start|>", "<|im_end|>"},
      BASE_TYPE,
      4,
      5,
      -1,
      6,
      false,
      "smollm",
      NULL,
      0},
     "token 3 is 'ab' (normal) in the target and 'abb' (normal) in the draft"},
    {"two swapped",
     {{"b", "a", "\xc3\xb0", "ab", "<|im_start|>", "<|im_end|>"},
      BASE_TYPE,
      4,
      5,
      -1,
      6,
      false,
      "smollm",
      "a b",
      0},
     "token 0 is 'a' (normal) in the target and 'b' (normal) in the draft"},
    {"another type",
     {BASE_TEXT,
      {NORMAL, USER, NORMAL, NORMAL, CONTROL, CONTROL},
      4,
      5,
      -1,
      6,
      false,
      "smollm",
      NULL,
      0},
     "token 1 is 'b' (normal) in the target and 'b' (user-defined) in the draft"},
    {"one token less",
     {{"a", "b", "\xc3\xb0", "ab", "<|im_start|>"},
      BASE_TYPE,
      4,
      -1,
      -1,
      6,
      false,
      "smollm",
      "a b",
      0},
     "the target has 6 tokens, the draft 5: token 5 is '<|im_end|>' (control) in the target alone"},
    {"one token more",
     {{"a", "b", "\xc3\xb0", "ab", "<|im_start|>", "<|im_end|>", "x"},
      {NORMAL, NORMAL, NORMAL, NORMAL, CONTROL, CONTROL, NORMAL},
      4,
      5,
      -1,
      7,
      false,
      "smollm",
      "a b",
      0},
     "the target has 6 tokens, the draft 7: token 6 is 'x' (normal) in the draft alone"},
    {"another bos",
     {BASE_TEXT, BASE_TYPE, 0, 5, -1, 6, false, "smollm", "a b", 0},
     "bos is token 4 in the target and token 0 in the draft"},
    {"another eos",
     {BASE_TEXT, BASE_TYPE, 4, 3, -1, 6, false, "smollm", "a b", 0},
     "eos is token 5 in the target and token 3 in the draft"},
    {"one more end",
     {BASE_TEXT, BASE_TYPE, 4, 5, 0, 6, false, "smollm", "a b", 0},
     "token 0, 'a' (normal), ends a generation in the draft and not in the target"},
    {"SentencePiece",
     {BASE_TEXT, BASE_TYPE, 4, 5, -1, 6, true, NULL, NULL, 0},
     "the target's tokens are byte-level BPE and the draft's are SentencePiece"},
    {"rows for half of the tokens",
     {BASE_TEXT, BASE_TYPE, 4, 5, -1, 3, false, "smollm", "a b", 0},
     "the draft's embedding has 3 rows for 6 tokens"},
    {"a head of end tokens",
     {{"a", "b", "\xc3\xb0", "ab", "<|im_start|>", "<|im_end|>"},
      BASE_TYPE,
      4,
      5,
      -1,
      6,
      false,
      "smollm",
      "a b",
      -1},
     "the draft's head of 1 tokens holds end tokens alone"},
};

static void test_pair_names_the_difference(void) {
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct err e = {0};
        struct model_source *target = open_source(write_words(&base));
        int rc = check(target, open_source(write_words(&cases[i].draft)), &e);
        if (rc != (cases[i].text ? E_INVALID : 0) ||
            (cases[i].text && !strstr(e.message, cases[i].text)))
            fail_msg("%s: %s \"%s\", wanted \"%s\"", cases[i].what, err_name(rc), e.message,
                     cases[i].text ? cases[i].text : "a pair");
    }
}

/* The same differences seen from the other side: the draft's padding, a target that ends more. */
static void test_pair_other_way(void) {
    struct err e = {0};
    struct words padded = cases[6].draft, ends = base, reduced = base, spm = base;
    assert_int_equal(padded.vocab, 8);
    ends.eot = 0;
    reduced.n_head = 2;
    spm.spm = true;
    struct model_source *t = open_source(write_words(&padded));
    assert_ok(check(t, open_source(write_words(&base)), &e), e);
    t = open_source(write_words(&ends));
    assert_int_equal(check(t, open_source(write_words(&base)), &e), E_INVALID);
    assert_non_null(strstr(e.message, "ends a generation in the target and not in the draft"));
    t = open_source(write_words(&reduced));
    assert_int_equal(check(t, open_source(write_words(&base)), &e), E_INVALID);
    assert_non_null(strstr(e.message, "is itself a draft"));
    t = open_source(write_words(&spm));
    assert_ok(check(t, open_source(write_words(&spm)), &e), e);
}

/* A draft whose own tokenizer cannot be read: the error says whose. */
static void test_pair_broken_tokenizer(void) {
    struct err e = {0};
    struct words w = base;
    w.pre = "who-knows";
    struct model_source *t = open_source(write_words(&base));
    assert_int_equal(check(t, open_source(write_words(&w)), &e), E_UNSUPPORTED);
    assert_non_null(strstr(e.message, "tandem-words-"));
    assert_non_null(strstr(e.message, "tokenizer: tokenizer.ggml.pre = 'who-knows'"));
}

/* Whole files: a draft of its own, one that borrows, and one made for another target. */
static void test_pair_tiny(void) {
    struct err e = {0};
    struct tiny_options t, other;
    struct tiny_draft d;
    tiny_model_default(&t);
    other = t;
    other.seed = 77;
    tiny_draft_default(&d, &t);
    d.context = 64; /* shorter than the target's: the engine stops proposing there */
    struct model_source *s = open_source(tiny_model_file(&t));
    assert_ok(check(s, open_source(tiny_draft_file(&t, &d)), &e), e);
    s = open_source(tiny_model_file(&other)); /* its own embedding: any model of these tokens */
    assert_ok(check(s, open_source(tiny_draft_file(&t, &d)), &e), e);
    d.borrow_embedding = true;
    s = open_source(tiny_model_file(&t));
    assert_ok(check(s, open_source(tiny_draft_file(&t, &d)), &e), e);
    s = open_source(tiny_model_file(&other));
    assert_int_equal(check(s, open_source(tiny_draft_file(&t, &d)), &e), E_INVALID);
    assert_non_null(strstr(e.message, "embedding: the draft was made for one of XXH3 "));
    assert_non_null(strstr(e.message, "the target's token_embd.weight has "));
    t.hidden = 32;
    t.n_heads = 2;
    s = open_source(tiny_model_file(&other));
    assert_int_equal(check(s, open_source(tiny_draft_file(&t, &d)), &e), E_INVALID);
    assert_non_null(strstr(e.message, "and has 32, the target 64"));
    s = open_source(tiny_draft_file(&other, &d)); /* both borrow: no tokenizer to compare with */
    struct model_source *draft = open_source(tiny_draft_file(&other, &d));
    assert_int_equal(model_check_pair(s, NULL, draft, &e), E_INVALID);
    assert_non_null(strstr(e.message, "is itself a draft"));
    model_source_close(s);
    model_source_close(draft);
}

/* ---- Out of memory ---- */

/* All steps of taking a draft beside an open target; nothing stays open. */
static int take_draft(const char *path, const struct model_borrow *borrow,
                      const struct tokenizer *t, struct kern *k, struct err *e) {
    static const struct model_caps caps = {
        .max_rows = 4, .max_seqs = 1, .max_blocks = 4, .max_logits = 4};
    struct model_source *s = NULL;
    struct model *m = NULL;
    int rc = model_source_open(&s, path, e);
    if (!rc) rc = model_check_pair(borrow->target_src, t, s, e);
    if (!rc) rc = model_open(&m, s, borrow, k, &caps, NULL, NULL, e);
    model_close(m);
    model_source_close(s);
    return rc;
}

/* The n-th allocation fails, and all after it, for every n until the draft opens: each time
 * E_NOMEM, and nothing is left behind. */
static void test_pair_out_of_memory(void) {
    static const int32_t ids[] = {1, 5, 200};
    struct tiny_options o;
    struct tiny_draft d;
    struct kern *k;
    struct model_borrow borrow;
    struct model *target;
    struct model_source *src;
    struct tokenizer *t;
    struct err e = {0};
    struct kern_options ko = {.n_threads = 1};
    struct model_caps caps = {.max_rows = 4, .max_seqs = 1, .max_blocks = 4, .max_logits = 4};
    tiny_model_default(&o);
    o.n_layers = 1;
    tiny_draft_default(&d, &o);
    src = open_source(tiny_model_file(&o));
    assert_ok(kern_cpu_open(&k, &ko, &e), e);
    assert_ok(tokenizer_open_gguf(&t, model_source_gguf(src), &e), e);
    assert_ok(model_open(&target, src, NULL, k, &caps, NULL, NULL, &e), e);
    borrow = (struct model_borrow){target, src};
    for (int kind = 0; kind < 2; kind++) {
        d.borrow_embedding = kind;
        d.head_ids = kind ? ids : NULL;
        d.n_head_ids = kind ? 3 : 0;
        const char *path = tiny_draft_file(&o, &d);
        assert_ok(take_draft(path, &borrow, t, k, &e), e); /* whatever is kept for good, is now */
        long before = fail_alloc_live();
        for (long n = 1, failed = 1; failed; n++) {
            memset(&e, 0, sizeof e);
            fail_alloc_at(n);
            int rc = take_draft(path, &borrow, t, k, &e);
            failed = fail_alloc_n_failed();
            fail_alloc_at(0);
            if (fail_alloc_live() != before)
                fail_msg("%ld blocks left when allocation %ld fails", fail_alloc_live() - before,
                         n);
            if (rc != (failed ? E_NOMEM : 0))
                fail_msg("%s \"%s\" when allocation %ld fails", err_name(rc), e.message, n);
            if (!failed) assert_true(n > 5); /* the hooks are live */
        }
        unlink(path);
    }
    model_close(target);
    tokenizer_close(t);
    model_source_close(src);
    k->ops->close(k);
}

/* The default target drafts for itself, and the tiny model does not. */
static void test_pair_default_target(void) {
    struct err e = {0};
    struct model_source *s, *draft;
    struct tiny_options t;
    assert_ok(model_source_open(&s, test_default_target(), &e), e);
    assert_ok(model_source_open(&draft, test_default_target(), &e), e);
    assert_ok(check(s, draft, &e), e);
    tiny_model_default(&t);
    assert_ok(model_source_open(&s, test_default_target(), &e), e);
    assert_int_equal(check(s, open_source(tiny_model_file(&t)), &e), E_INVALID);
    assert_non_null(strstr(e.message, "token 0 is "));
}

const struct test tests[] = {
    {"pair_names_the_difference", TEST_QUICK, 5000, test_pair_names_the_difference},
    {"pair_other_way", TEST_QUICK, 5000, test_pair_other_way},
    {"pair_broken_tokenizer", TEST_QUICK, 5000, test_pair_broken_tokenizer},
    {"pair_tiny", TEST_QUICK, 5000, test_pair_tiny},
    {"pair_out_of_memory", TEST_QUICK, 20000, test_pair_out_of_memory},
    {"pair_default_target", TEST_QUICK, 20000, test_pair_default_target},
    {0},
};
