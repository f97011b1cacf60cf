#ifndef TANDEM_MODEL_TOKENIZER_PRIVATE_H
#define TANDEM_MODEL_TOKENIZER_PRIVATE_H

/* The parts of a tokenizer, shared by the files of model/ that build and use one:
 *   vocab.c         entries, their bytes, text -> id
 *   added.c         special and user-defined tokens found in raw text
 *   normalize.c     NFC
 *   pretokenize.c   patterns that cut text before byte-level BPE
 *   bpe.c           merges by rank          spm.c  merges by score
 *   tokenizer.c     encode and decode       tokenizer_gguf.c, tokenizer_hf.c  readers
 *   tokenizer_bytes.c  for models without one */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/strbuf.h"
#include "model/tokenizer.h"

enum {
    VOCAB_MAX_TOKENS = 1 << 20,
    VOCAB_MAX_TOKEN_BYTES = 4096, /* one token's text in the file */
    VOCAB_MAX_TEXT_BYTES = 1 << 28,
    BPE_MAX_MERGES = 1 << 21,
    TOKENIZER_MAX_TEXT_BYTES = 1 << 28, /* one call of encode */
    TOKENIZER_MAX_EOG = 64,
};

/* U+2581, which stands for a space in SentencePiece vocabularies. */
#define SPM_SPACE "\xe2\x96\x81"
enum { SPM_SPACE_BYTES = 3 };

/* Numbered as tokenizer.ggml.token_type. */
enum token_type {
    TOKEN_NORMAL = 1,
    TOKEN_UNKNOWN = 2,
    TOKEN_CONTROL = 3,
    TOKEN_USER_DEFINED = 4,
    TOKEN_UNUSED = 5,
    TOKEN_BYTE = 6
};

/* ---- vocab.c ---- */

/* Entries in order of id. A token's text is what it stands for: raw bytes in a byte-level
 * vocabulary, the file's own text (with U+2581) in a SentencePiece one. Two name spaces, so that an
 * added token may read like an ordinary one: NORMAL entries, and all others but UNUSED. */
struct vocab {
    int n, cap;
    char *text; /* all texts, end to end */
    size_t text_bytes, text_cap;
    uint32_t *offset;     /* [n + 1] */
    uint8_t *type;        /* [n] enum token_type */
    float *score;         /* [n]; zeros where the file has none */
    int32_t *slot;        /* open addressing, -1 free */
    uint32_t mask;        /* slots - 1 */
    uint64_t seed;        /* against files made to collide */
    size_t max_bytes;     /* of NORMAL and USER_DEFINED entries */
    int32_t byte_id[256]; /* token of one byte, -1 where the vocabulary has none */
};

/* Append the next id's entry. `raw` is the text as the file has it; byte_level decodes it unless
 * the type says that it is taken literally. E_FORMAT with the id, E_NOMEM. */
int vocab_add(struct vocab *v, const char *raw, size_t n, int type, float score, bool byte_level,
              struct err *e);

/* Build the text -> id table and byte_id. E_FORMAT for two equal entries. */
int vocab_index(struct vocab *v, bool byte_level, struct err *e);

void vocab_deinit(struct vocab *v);

static inline const char *vocab_text(const struct vocab *v, int id, size_t *n) {
    *n = v->offset[id + 1] - v->offset[id];
    return v->text + v->offset[id];
}

/* Ordinary entry with this text, or -1. */
int vocab_find(const struct vocab *v, const char *s, size_t n);
/* Added, control, unknown or byte entry with this text, or -1. */
int vocab_find_special(const struct vocab *v, const char *s, size_t n);

/* Undo the byte-level alphabet (256 printable code points, one a byte). Writes at most n bytes to
 * `out`; SIZE_MAX where s holds a character outside of the alphabet. */
size_t vocab_byte_level_decode(const char *s, size_t n, char *out);

/* Value of "<0xAB>", or -1. */
int vocab_parse_byte(const char *s, size_t n);

/* ---- added.c ---- */

enum { ADDED_LSTRIP = 1, ADDED_RSTRIP = 2 };

struct added {
    int n;
    int32_t *sorted; /* [n] ids in byte order of their text */
    uint8_t *flags;  /* [n] ADDED_*, in the same order */
    bool first[256]; /* can a match begin with this byte? */
};

struct added_match {
    size_t begin, end; /* matched bytes, stripped white space included */
    int id;
};

/* Collect the entries that are matched in raw text (control, unknown, user-defined). `flags` is
 * indexed by id, or NULL. */
int added_build(struct added *a, const struct vocab *v, const uint8_t *flags, struct err *e);
void added_deinit(struct added *a);

/* The next match in text[from..n): leftmost, then longest. Control and unknown tokens only with
 * `special`. */
bool added_next(const struct added *a, const struct vocab *v, const char *text, size_t n,
                size_t from, bool special, struct added_match *m);

/* Length of the white space character that text[0..n) begins with, 0 where it begins with none. */
size_t added_space_at(const char *text, size_t n);

/* ---- normalize.c ---- */

/* NFC of valid UTF-8 text[0..n) appended to `out`. Time O(n log n) for any text. */
int normalize_nfc(const char *text, size_t n, struct strbuf *out, struct err *e);

/* ---- pretokenize.c ---- */

struct pretokenizer;

enum pretokenizer_kind {
    PRE_NONE, /* SentencePiece */
    PRE_GPT2,
    PRE_LLAMA3,
    PRE_QWEN2,
    PRE_SMOLLM,
    PRE_TEKKEN,
    PRE_N_KINDS
};

/* The kind whose pattern Hugging Face files write as exactly `pattern`, or PRE_NONE. */
enum pretokenizer_kind pretokenizer_by_pattern(const char *pattern, size_t n);

int pretokenizer_open(struct pretokenizer **out, enum pretokenizer_kind kind, struct err *e);
void pretokenizer_close(struct pretokenizer *p);

/* Called for each pre-token, in order; a non-zero return stops the walk and is returned. */
typedef int pretokenizer_fn(void *arg, const char *piece, size_t n, struct err *e);

/* Cut valid UTF-8 text[0..n) into pieces that cover it. E_TOO_LONG where a match limit was hit. */
int pretokenizer_split(const struct pretokenizer *p, const char *text, size_t n,
                       pretokenizer_fn *fn, void *arg, struct err *e);

/* ---- bpe.c ---- */

struct bpe_slot {
    int32_t left, right; /* left -1: free */
    int32_t rank;
    int32_t merged;
};

/* Pair of ids -> rank and merged id. */
struct bpe {
    struct bpe_slot *slot;
    uint32_t mask;
    uint64_t seed;
    int n;
};

int bpe_init(struct bpe *b, size_t n_merges, struct err *e);
void bpe_deinit(struct bpe *b);

/* Add the pair with the next rank; a pair seen before keeps its first rank. */
void bpe_add(struct bpe *b, int left, int right, int merged, int rank);

/* One symbol of a text being merged: a doubly linked list inside an array. */
struct merge_symbol {
    int32_t id;         /* -1: swallowed by its left neighbour */
    int32_t prev, next; /* -1 at the ends */
    uint32_t begin, n;  /* bytes in the text (SentencePiece) */
};

/* A call's working memory, grown as needed and reused between pieces. */
struct merge_scratch {
    struct merge_symbol *symbol;
    size_t symbol_cap;
    uint64_t *heap;
    size_t heap_cap, heap_n;
};

int merge_scratch_reserve(struct merge_scratch *s, size_t n_symbols, struct err *e);
void merge_scratch_deinit(struct merge_scratch *s);

/* A binary min-heap of keys (order << 32 | symbol index): lowest order first, then leftmost. */
void merge_heap_push(struct merge_scratch *s, uint64_t key);
uint64_t merge_heap_pop(struct merge_scratch *s);

/* Link symbol[0..n) as neighbours. */
void merge_link(struct merge_scratch *s, size_t n);

/* Merge symbol[0..n), whose ids are set, by rank. What remains is walked by `next` from 0. */
void bpe_merge(const struct bpe *b, struct merge_scratch *s, size_t n);

/* ---- spm.c ---- */

/* Merge symbol[0..n), whose spans in `text` are set, by score; ids are -1 where no entry fits.
 * Swallowed symbols have n == 0. */
void spm_merge(const struct vocab *v, struct merge_scratch *s, size_t n, const char *text);

/* ---- tokenizer ---- */

enum tokenizer_algorithm { ALGORITHM_BYTE_BPE, ALGORITHM_SPM_SCORE, ALGORITHM_SPM_RANK };
enum prefix_scheme { PREFIX_NEVER, PREFIX_FIRST, PREFIX_ALWAYS };

struct tokenizer {
    enum tokenizer_algorithm algorithm;
    enum pretokenizer_kind kind;
    bool seen_byte_level;     /* while a tokenizer.json is read */
    struct pretokenizer *pre; /* NULL unless ALGORITHM_BYTE_BPE */
    struct vocab vocab;
    struct added added;
    struct bpe bpe;
    bool nfc;
    bool ignore_merges; /* a pre-token that is an entry is taken whole */
    bool byte_fallback; /* SentencePiece: unknown characters become byte tokens */
    bool fuse_unknown;
    bool split_words; /* SentencePiece in tokenizer.json: cut before each U+2581 */
    enum prefix_scheme prefix;
    bool prefix_unless_space; /* none before a text that begins with a space (Metaspace) */
    bool strip_first_space;   /* tokenizer_decode drops one leading space */
    bool add_bos, add_eos;
    bool made_up; /* tokenizer_open_bytes */
    int bos, eos, unknown, padding;
    int eog[TOKENIZER_MAX_EOG];
    int n_eog;
    uint64_t fingerprint;
};

/* A flag of tokenizer_encode for our own use: the text follows other tokens, so that a model that
 * puts a space before the first text only puts none here. */
enum { TOKENIZER__CONTINUES = 1 << 8 };

/* Mark `id` as ending a generation (once). False when the list is full. */
bool tokenizer__add_eog(struct tokenizer *t, int id);

/* Append one id. E_TOO_LONG at the limit, E_NOMEM. */
int tokenizer__push(struct tokens *v, int id, struct err *e);

/* Mark the entries whose text is a known end of turn ("<|im_end|>", "<|eot_id|>", ...). */
void tokenizer__add_known_eog(struct tokenizer *t);

/* Type of an entry with this text: control where it is a mark of turns, whatever a careless file
 * says, so that nobody can type one. */
int tokenizer__type(const char *text, size_t n, int type);

/* Build what both readers need from the entries: tables, added tokens, pre-tokenizer, fingerprint.
 */
int tokenizer__index(struct tokenizer *t, struct err *e);
int tokenizer__finish(struct tokenizer *t, const uint8_t *added_flags, struct err *e);

/* Add the merge of two texts written as in the file. E_FORMAT names a part that is no entry. */
int tokenizer__add_merge(struct tokenizer *t, size_t rank, const char *left, size_t left_n,
                         const char *right, size_t right_n, struct err *e);

/* tokenizer.json and its companions as bytes (the last two may be NULL): what the reader of folders
 * and the fuzzer share. */
int tokenizer__open_hf_bytes(struct tokenizer **out, const char *json, size_t n, const char *config,
                             size_t config_n, const char *generation, size_t generation_n,
                             struct err *e);

#endif
