/* Encode and decode, whichever algorithm; what both readers share when they open one. */
#include "model/tokenizer.h"

#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "base/checked.h"
#include "base/utf8.h"
#include "model/tokenizer_private.h"

/* ---- opening ---- */

bool tokenizer__add_eog(struct tokenizer *t, int id) {
    if (id < 0 || tokenizer_is_eog(t, id)) return true;
    if (t->n_eog == TOKENIZER_MAX_EOG) return false;
    t->eog[t->n_eog++] = id;
    return true;
}

/* Marks of turns, those that end an answer first. */
enum { N_ENDS = 9 };
static const char *const turn_marks[] = {
    "<|im_end|>",          "<|eot_id|>",       "<|eom_id|>", "<|end|>",
    "<|end_of_text|>",     "<|endoftext|>",    "<|eot|>",    "<|end_of_turn|>",
    "<end_of_turn>",       "<|im_start|>",     "<|im_sep|>", "<|begin_of_text|>",
    "<|start_header_id|>", "<|end_header_id|>"};

void tokenizer__add_known_eog(struct tokenizer *t) {
    for (size_t i = 0; i < N_ENDS; i++) {
        int id = vocab_find_special(&t->vocab, turn_marks[i], strlen(turn_marks[i]));
        if (id >= 0 && t->vocab.type[id] == TOKEN_CONTROL) (void)tokenizer__add_eog(t, id);
    }
}

int tokenizer__type(const char *text, size_t n, int type) {
    if (n == 0 || text[0] != '<' || (type != TOKEN_NORMAL && type != TOKEN_USER_DEFINED))
        return type;
    for (size_t i = 0; i < sizeof turn_marks / sizeof *turn_marks; i++)
        if (strlen(turn_marks[i]) == n && memcmp(turn_marks[i], text, n) == 0) return TOKEN_CONTROL;
    return type;
}

int tokenizer__index(struct tokenizer *t, struct err *e) {
    return vocab_index(&t->vocab, t->algorithm == ALGORITHM_BYTE_BPE, e);
}

/* Id of a merge's part or result. Ordinary entries first; an added token may also be a merge's
 * result and then keeps the file's text. Control tokens never come from merges: plain text must not
 * make one. */
static int find_merge_part(const struct tokenizer *t, const char *s, size_t n) {
    char raw[2 * VOCAB_MAX_TOKEN_BYTES];
    size_t len = t->algorithm == ALGORITHM_BYTE_BPE ? vocab_byte_level_decode(s, n, raw) : SIZE_MAX;
    int id = len == SIZE_MAX ? vocab_find(&t->vocab, s, n) : vocab_find(&t->vocab, raw, len);
    return id >= 0 ? id : vocab_find_special(&t->vocab, s, n);
}

int tokenizer__add_merge(struct tokenizer *t, size_t rank, const char *left, size_t left_n,
                         const char *right, size_t right_n, struct err *e) {
    if (left_n == 0 || right_n == 0 || left_n > VOCAB_MAX_TOKEN_BYTES ||
        right_n > VOCAB_MAX_TOKEN_BYTES)
        return err_raise(e, E_FORMAT, "merge %zu has parts of %zu and %zu bytes", rank, left_n,
                         right_n);
    char both[2 * VOCAB_MAX_TOKEN_BYTES];
    memcpy(both, left, left_n);
    memcpy(both + left_n, right, right_n);
    int l = find_merge_part(t, left, left_n), r = find_merge_part(t, right, right_n);
    int merged = find_merge_part(t, both, left_n + right_n);
    if (l < 0 || r < 0 || merged < 0)
        return err_raise(e, E_FORMAT, "merge %zu, '%.*s' + '%.*s': '%.*s' is no token", rank,
                         (int)min_size(left_n, 100), left, (int)min_size(right_n, 100), right,
                         (int)min_size(l < 0   ? left_n
                                       : r < 0 ? right_n
                                               : left_n + right_n,
                                       200),
                         l < 0   ? left
                         : r < 0 ? right
                                 : both);
    if (t->vocab.type[merged] != TOKEN_CONTROL) bpe_add(&t->bpe, l, r, merged, (int)rank);
    return 0;
}

static int fingerprint(const struct tokenizer *t, uint64_t *out, struct err *e) {
    const struct vocab *v = &t->vocab;
    XXH64_state_t *state = XXH64_createState();
    if (!state) return err_raise(e, E_NOMEM, "fingerprint");
    XXH64_reset(state, 0);
    /* Unused entries at the end only pad: conversions add them or not. */
    int n = v->n;
    while (n > 0 && v->type[n - 1] == TOKEN_UNUSED) n--;
    int32_t head[] = {t->algorithm, t->kind,    t->nfc,     t->ignore_merges, t->byte_fallback,
                      t->prefix,    t->add_bos, t->add_eos, t->bos,           t->eos,
                      t->unknown,   t->n_eog,   n,          t->split_words,   t->bpe.n};
    XXH64_update(state, head, sizeof head);
    int32_t eog_sum = 0;
    for (int i = 0; i < t->n_eog; i++) eog_sum += t->eog[i] * 31 + 7; /* in whichever order */
    XXH64_update(state, &eog_sum, sizeof eog_sum);
    for (int id = 0; id < n; id++) {
        size_t len;
        const char *text = vocab_text(v, id, &len);
        uint32_t entry[2] = {(uint32_t)len, v->type[id]};
        XXH64_update(state, entry, sizeof entry);
        XXH64_update(state, text, len);
        if (t->algorithm == ALGORITHM_SPM_SCORE) XXH64_update(state, &v->score[id], sizeof(float));
    }
    for (int i = 0; i < t->added.n; i++) XXH64_update(state, &t->added.flags[i], 1);
    uint64_t merges = 0; /* the table's order is not the file's: add up */
    for (uint32_t i = 0; t->bpe.slot && i <= t->bpe.mask; i++)
        if (t->bpe.slot[i].left >= 0) merges += XXH64(&t->bpe.slot[i], sizeof t->bpe.slot[i], 1);
    XXH64_update(state, &merges, sizeof merges);
    *out = XXH64_digest(state);
    XXH64_freeState(state);
    return 0;
}

int tokenizer__finish(struct tokenizer *t, const uint8_t *added_flags, struct err *e) {
    int rc = added_build(&t->added, &t->vocab, added_flags, e);
    if (!rc && t->algorithm == ALGORITHM_BYTE_BPE) rc = pretokenizer_open(&t->pre, t->kind, e);
    if (!rc) rc = fingerprint(t, &t->fingerprint, e);
    return rc;
}

void tokenizer_close(struct tokenizer *t) {
    if (!t) return;
    pretokenizer_close(t->pre);
    added_deinit(&t->added);
    bpe_deinit(&t->bpe);
    vocab_deinit(&t->vocab);
    free(t);
}

/* ---- questions ---- */

int tokenizer_n_tokens(const struct tokenizer *t) {
    return t->vocab.n;
}
bool tokenizer_is_made_up(const struct tokenizer *t) {
    return t->made_up;
}
int tokenizer_bos(const struct tokenizer *t) {
    return t->bos;
}
bool tokenizer_adds_bos(const struct tokenizer *t) {
    return t->add_bos;
}
uint64_t tokenizer_fingerprint(const struct tokenizer *t) {
    return t->fingerprint;
}

bool tokenizer_is_eog(const struct tokenizer *t, int id) {
    for (int i = 0; i < t->n_eog; i++)
        if (t->eog[i] == id) return true;
    return false;
}

bool tokenizer_is_control(const struct tokenizer *t, int id) {
    return id >= 0 && id < t->vocab.n &&
           (t->vocab.type[id] == TOKEN_CONTROL || t->vocab.type[id] == TOKEN_UNKNOWN);
}

int tokenizer_find(const struct tokenizer *t, const char *s) {
    int id = vocab_find_special(&t->vocab, s, strlen(s));
    return id >= 0 ? id : vocab_find(&t->vocab, s, strlen(s));
}

/* ---- encoding ---- */

void tokens_deinit(struct tokens *v) {
    free(v->ids);
    v->ids = NULL;
    v->n = v->cap = 0;
}

int tokenizer__push(struct tokens *v, int id, struct err *e) {
    if (v->limit && v->n >= v->limit)
        return err_raise(e, E_TOO_LONG, "more than %zu tokens", v->limit);
    if (v->n == v->cap) {
        size_t cap = v->cap ? v->cap * 2 : 64;
        int32_t *ids = realloc(v->ids, cap * sizeof *ids);
        if (!ids) return err_raise(e, E_NOMEM, "%zu tokens", cap);
        v->ids = ids;
        v->cap = cap;
    }
    v->ids[v->n++] = id;
    return 0;
}

/* What one call of tokenizer_encode carries around. */
struct encoder {
    const struct tokenizer *t;
    struct tokens *out;
    struct merge_scratch scratch;
    struct strbuf text; /* normalised segment */
};

/* Append the unknown token to symbol[0..n), fused with one before it; returns the new n. Without an
 * unknown token the character leaves no trace, as in the model's own tokenizer (source: tokenizers,
 * models/bpe/model.rs). */
static size_t add_unknown(const struct tokenizer *t, struct merge_symbol *symbol, size_t n) {
    if (t->unknown < 0 || (t->fuse_unknown && n > 0 && symbol[n - 1].id == t->unknown)) return n;
    symbol[n].id = t->unknown;
    return n + 1;
}

/* Merge symbol[0..n) by rank and push what remains. */
static int push_merged(struct encoder *c, size_t n, struct err *e) {
    int rc = 0;
    if (n == 0) return 0;
    bpe_merge(&c->t->bpe, &c->scratch, n);
    for (int32_t i = 0; i >= 0 && !rc; i = c->scratch.symbol[i].next)
        rc = tokenizer__push(c->out, c->scratch.symbol[i].id, e);
    return rc;
}

/* One pre-token of a byte-level vocabulary. */
static int encode_bytes(void *arg, const char *piece, size_t n, struct err *e) {
    struct encoder *c = arg;
    const struct vocab *v = &c->t->vocab;
    if (n == 1 || c->t->ignore_merges) {
        int id = n == 1 ? v->byte_id[(uint8_t)piece[0]] : vocab_find(v, piece, n);
        if (id >= 0) return tokenizer__push(c->out, id, e);
    }
    int rc = merge_scratch_reserve(&c->scratch, n, e);
    if (rc) return rc;
    struct merge_symbol *symbol = c->scratch.symbol;
    size_t n_symbols = 0;
    for (size_t i = 0; i < n; i++) {
        int id = v->byte_id[(uint8_t)piece[i]];
        if (id < 0) n_symbols = add_unknown(c->t, symbol, n_symbols);
        else symbol[n_symbols++].id = id;
    }
    return push_merged(c, n_symbols, e);
}

/* A segment for a byte-level vocabulary: valid runs go through the pattern, invalid bytes stand
 * alone. */
static int encode_segment_bytes(struct encoder *c, const char *s, size_t n, struct err *e) {
    for (size_t i = 0; i < n;) {
        size_t end = i;
        uint32_t cp;
        int used, rc = 0;
        while (end < n && (used = utf8_decode(s + end, n - end, &cp)) > 0) end += (size_t)used;
        if (end > i && c->t->nfc) {
            strbuf_clear(&c->text);
            rc = normalize_nfc(s + i, end - i, &c->text, e);
            if (!rc)
                rc = pretokenizer_split(c->t->pre, c->text.data, c->text.n, encode_bytes, c, e);
        } else if (end > i) {
            rc = pretokenizer_split(c->t->pre, s + i, end - i, encode_bytes, c, e);
        }
        if (!rc && end < n) rc = encode_bytes(c, s + end++, 1, e);
        if (rc) return rc;
        i = end;
    }
    return 0;
}

/* Can all bytes of a character be written as byte tokens? */
static bool has_bytes(const struct tokenizer *t, const char *s, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (t->vocab.byte_id[(uint8_t)s[i]] < 0) return false;
    return t->byte_fallback;
}

/* SentencePiece text merged by rank (tokenizer.json). Characters without an entry become byte
 * tokens or the unknown token before merging. */
static int encode_word_by_rank(struct encoder *c, const char *s, size_t n, struct err *e) {
    const struct tokenizer *t = c->t;
    int rc = merge_scratch_reserve(&c->scratch, n, e);
    if (rc) return rc;
    struct merge_symbol *symbol = c->scratch.symbol;
    size_t n_symbols = 0;
    uint32_t cp;
    for (size_t i = 0; i < n;) {
        int used = utf8_decode(s + i, n - i, &cp);
        size_t len = used > 0 ? (size_t)used : 1;
        int id = vocab_find(&t->vocab, s + i, len);
        if (id >= 0) symbol[n_symbols++].id = id;
        else if (has_bytes(t, s + i, len))
            for (size_t k = 0; k < len; k++)
                symbol[n_symbols++].id = t->vocab.byte_id[(uint8_t)s[i + k]];
        else n_symbols = add_unknown(t, symbol, n_symbols);
        i += len;
    }
    return push_merged(c, n_symbols, e);
}

/* SentencePiece text merged by score (GGUF). */
static int encode_word_by_score(struct encoder *c, const char *s, size_t n, struct err *e) {
    const struct tokenizer *t = c->t;
    int rc = merge_scratch_reserve(&c->scratch, n, e);
    if (rc) return rc;
    struct merge_symbol *symbol = c->scratch.symbol;
    size_t n_symbols = 0;
    uint32_t cp;
    for (size_t i = 0; i < n;) {
        int used = utf8_decode(s + i, n - i, &cp);
        size_t len = used > 0 ? (size_t)used : 1;
        symbol[n_symbols].begin = (uint32_t)i;
        symbol[n_symbols++].n = (uint32_t)len;
        i += len;
    }
    spm_merge(&t->vocab, &c->scratch, n_symbols, s);
    bool last_unknown = false;
    for (int32_t i = 0; i >= 0 && !rc; i = symbol[i].next) {
        const char *text = s + symbol[i].begin;
        bool unknown = false;
        if (symbol[i].id >= 0) {
            rc = tokenizer__push(c->out, symbol[i].id, e);
        } else if (has_bytes(t, text, symbol[i].n)) {
            for (uint32_t k = 0; k < symbol[i].n && !rc; k++)
                rc = tokenizer__push(c->out, t->vocab.byte_id[(uint8_t)text[k]], e);
        } else {
            unknown = true;
            if (t->unknown >= 0 && !(t->fuse_unknown && last_unknown))
                rc = tokenizer__push(c->out, t->unknown, e);
        }
        last_unknown = unknown;
    }
    return rc;
}

/* A segment for a SentencePiece vocabulary: spaces become U+2581, with one more in front where the
 * model wants it. */
static int encode_segment_spm(struct encoder *c, const char *s, size_t n, bool first,
                              struct err *e) {
    const struct tokenizer *t = c->t;
    struct strbuf *b = &c->text;
    strbuf_clear(b);
    b->limit = SIZE_MAX / 2;
    bool prefix = t->prefix == PREFIX_ALWAYS || (t->prefix == PREFIX_FIRST && first);
    /* Metaspace looks before it adds, Prepend does not. */
    if (prefix && t->prefix_unless_space &&
        (s[0] == ' ' || (n >= SPM_SPACE_BYTES && !memcmp(s, SPM_SPACE, SPM_SPACE_BYTES))))
        prefix = false;
    if (prefix) strbuf_append(b, SPM_SPACE, SPM_SPACE_BYTES);
    for (size_t i = 0; i < n;) {
        size_t end = i;
        while (end < n && s[end] != ' ') end++;
        strbuf_append(b, s + i, end - i);
        if (end < n) strbuf_append(b, SPM_SPACE, SPM_SPACE_BYTES), end++;
        i = end;
    }
    if (b->failed) return err_raise(e, E_NOMEM, "encoding %zu bytes", n);
    if (t->algorithm == ALGORITHM_SPM_SCORE) return encode_word_by_score(c, b->data, b->n, e);
    if (!t->split_words) return encode_word_by_rank(c, b->data, b->n, e);
    int rc = 0;
    for (size_t i = 0; i < b->n && !rc;) {
        size_t end = i + 1;
        while (end < b->n && !(b->n - end >= SPM_SPACE_BYTES &&
                               memcmp(b->data + end, SPM_SPACE, SPM_SPACE_BYTES) == 0))
            end++;
        rc = encode_word_by_rank(c, b->data + i, end - i, e);
        i = end;
    }
    return rc;
}

int tokenizer_encode(const struct tokenizer *t, const char *text, size_t n, unsigned flags,
                     struct tokens *out, struct err *e) {
    if (n > TOKENIZER_MAX_TEXT_BYTES)
        return err_raise(e, E_TOO_LONG, "text of %zu bytes, at most %d", n,
                         TOKENIZER_MAX_TEXT_BYTES);
    struct encoder c = {.t = t, .out = out};
    bool special = flags & TOKENIZER_PARSE_SPECIAL;
    int rc = 0;
    if ((flags & TOKENIZER_ADD_SPECIAL) && t->add_bos && t->bos >= 0)
        rc = tokenizer__push(out, t->bos, e);
    for (size_t at = 0; at < n && !rc;) {
        struct added_match m = {.begin = n, .end = n, .id = -1};
        added_next(&t->added, &t->vocab, text, n, at, special, &m);
        if (m.begin > at && t->algorithm == ALGORITHM_BYTE_BPE)
            rc = encode_segment_bytes(&c, text + at, m.begin - at, e);
        else if (m.begin > at)
            rc = encode_segment_spm(&c, text + at, m.begin - at,
                                    at == 0 && !(flags & TOKENIZER__CONTINUES), e);
        if (!rc && m.id >= 0) rc = tokenizer__push(out, m.id, e);
        at = m.end;
    }
    if (!rc && (flags & TOKENIZER_ADD_SPECIAL) && t->add_eos && t->eos >= 0)
        rc = tokenizer__push(out, t->eos, e);
    merge_scratch_deinit(&c.scratch);
    strbuf_deinit(&c.text);
    return rc;
}

/* ---- decoding ---- */

void tokenizer_token_bytes(const struct tokenizer *t, int id, bool special, struct strbuf *out) {
    if (id < 0 || id >= t->vocab.n) return;
    int type = t->vocab.type[id];
    if (type == TOKEN_UNUSED || (!special && tokenizer_is_control(t, id))) return;
    size_t n;
    const char *s = vocab_text(&t->vocab, id, &n);
    if (type == TOKEN_BYTE && t->algorithm != ALGORITHM_BYTE_BPE) {
        strbuf_append_char(out, (char)vocab_parse_byte(s, n));
        return;
    }
    if (t->algorithm == ALGORITHM_BYTE_BPE || type == TOKEN_CONTROL || type == TOKEN_UNKNOWN) {
        strbuf_append(out, s, n);
        return;
    }
    for (size_t i = 0; i < n;) {
        if (n - i >= SPM_SPACE_BYTES && memcmp(s + i, SPM_SPACE, SPM_SPACE_BYTES) == 0) {
            strbuf_append_char(out, ' ');
            i += SPM_SPACE_BYTES;
        } else {
            strbuf_append_char(out, s[i++]);
        }
    }
}

void tokenizer_decode(const struct tokenizer *t, const int32_t *ids, size_t n, bool special,
                      struct strbuf *out) {
    size_t start = out->n;
    for (size_t i = 0; i < n; i++) {
        tokenizer_token_bytes(t, ids[i], special, out);
        if (t->strip_first_space && start != SIZE_MAX && out->n > start) {
            if (out->data[start] == ' ') {
                memmove(out->data + start, out->data + start + 1, out->n - start); /* NUL too */
                out->n--;
            }
            start = SIZE_MAX; /* looked at once */
        }
    }
}
