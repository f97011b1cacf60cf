/* The entries of a vocabulary and the way from text to id. */
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "base/checked.h"
#include "base/clock.h"
#include "base/utf8.h"
#include "model/tokenizer_private.h"

/* GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the other 68 are numbered from
 * U+0100 on in order of their value (source: byte_level.rs of the tokenizers project, encoder.py of
 * GPT-2). */
static bool byte_is_printable(int b) {
    return (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
}

/* Byte that code point `cp` stands for, or -1. */
static int byte_of_code_point(uint32_t cp) {
    if (cp < 256) return byte_is_printable((int)cp) ? (int)cp : -1;
    if (cp >= 256 + 68) return -1;
    int left = (int)cp - 256; /* the left-th byte that is not printable: 0..32, 127..160, 173 */
    if (left < 33) return left;
    if (left < 67) return left - 33 + 127;
    return 173;
}

size_t vocab_byte_level_decode(const char *s, size_t n, char *out) {
    size_t len = 0;
    for (size_t i = 0; i < n;) {
        uint32_t cp;
        int used = utf8_decode(s + i, n - i, &cp);
        int b = used > 0 ? byte_of_code_point(cp) : -1;
        if (b < 0) return SIZE_MAX;
        out[len++] = (char)b;
        i += (size_t)used;
    }
    return len;
}

static int hex_digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    return -1;
}

int vocab_parse_byte(const char *s, size_t n) {
    if (n != 6 || memcmp(s, "<0x", 3) != 0 || s[5] != '>') return -1;
    int hi = hex_digit(s[3]), lo = hex_digit(s[4]);
    return hi < 0 || lo < 0 ? -1 : hi * 16 + lo;
}

static int vocab_grow(struct vocab *v, size_t text, struct err *e) {
    if (v->n == v->cap) {
        int cap = v->cap ? v->cap * 2 : 1024;
        uint32_t *offset = realloc(v->offset, ((size_t)cap + 1) * sizeof *offset);
        if (offset) v->offset = offset;
        uint8_t *type = realloc(v->type, (size_t)cap * sizeof *type);
        if (type) v->type = type;
        float *score = realloc(v->score, (size_t)cap * sizeof *score);
        if (score) v->score = score;
        if (!offset || !type || !score)
            return err_raise(e, E_NOMEM, "vocabulary of %d entries", cap);
        if (v->n == 0) v->offset[0] = 0;
        v->cap = cap;
    }
    if (!v->text || v->text_cap - v->text_bytes < text) {
        size_t cap = max_size(v->text_cap * 2, v->text_bytes + text + 4096);
        char *grown = realloc(v->text, cap);
        if (!grown) return err_raise(e, E_NOMEM, "vocabulary text of %zu bytes", cap);
        v->text = grown;
        v->text_cap = cap;
    }
    return 0;
}

int vocab_add(struct vocab *v, const char *raw, size_t n, int type, float score, bool byte_level,
              struct err *e) {
    if (v->n >= VOCAB_MAX_TOKENS)
        return err_raise(e, E_FORMAT, "more than %d tokens", VOCAB_MAX_TOKENS);
    if (n > VOCAB_MAX_TOKEN_BYTES)
        return err_raise(e, E_FORMAT, "token %d has %zu bytes, more than %d", v->n, n,
                         VOCAB_MAX_TOKEN_BYTES);
    if (type < TOKEN_NORMAL || type > TOKEN_BYTE)
        return err_raise(e, E_FORMAT, "token %d has type %d, known are 1..6", v->n, type);
    if (!(score > -3e38f && score < 3e38f))
        return err_raise(e, E_FORMAT, "token %d has score %g", v->n, (double)score);
    if (v->text_bytes + n > VOCAB_MAX_TEXT_BYTES)
        return err_raise(e, E_FORMAT, "more than %d bytes of token text", VOCAB_MAX_TEXT_BYTES);
    int rc = vocab_grow(v, n, e);
    if (rc) return rc;
    char *at = v->text + v->text_bytes;
    size_t len = SIZE_MAX;
    if (byte_level && type == TOKEN_NORMAL) len = vocab_byte_level_decode(raw, n, at);
    if (len == SIZE_MAX) { /* not written in the alphabet: it stands for itself */
        len = n;
        if (n) memcpy(at, raw, n);
    }
    if (!byte_level && type == TOKEN_BYTE && vocab_parse_byte(raw, n) < 0)
        return err_raise(e, E_FORMAT, "byte token %d reads '%.*s', not <0xNN>", v->n, (int)n, raw);
    v->type[v->n] = (uint8_t)type;
    v->score[v->n] = score;
    v->text_bytes += len;
    v->offset[++v->n] = (uint32_t)v->text_bytes;
    return 0;
}

static uint64_t vocab_hash(const struct vocab *v, const char *s, size_t n, bool special) {
    return XXH3_64bits_withSeed(s, n, v->seed + special);
}

static int find_in(const struct vocab *v, const char *s, size_t n, bool special) {
    if (!v->slot || n == 0) return -1;
    for (uint64_t h = vocab_hash(v, s, n, special);; h++) {
        int id = v->slot[h & v->mask];
        if (id < 0) return -1;
        size_t len;
        const char *text = vocab_text(v, id, &len);
        if (len == n && (v->type[id] != TOKEN_NORMAL) == special && memcmp(text, s, n) == 0)
            return id;
    }
}

int vocab_find(const struct vocab *v, const char *s, size_t n) {
    return find_in(v, s, n, false);
}

int vocab_find_special(const struct vocab *v, const char *s, size_t n) {
    return find_in(v, s, n, true);
}

int vocab_index(struct vocab *v, bool byte_level, struct err *e) {
    if (v->n == 0) return err_raise(e, E_FORMAT, "the vocabulary is empty");
    uint32_t n_slots = 16;
    while (n_slots < 2 * (uint32_t)v->n) n_slots *= 2;
    v->slot = malloc(n_slots * sizeof *v->slot);
    if (!v->slot) return err_raise(e, E_NOMEM, "table of %u tokens", n_slots);
    memset(v->slot, 0xff, n_slots * sizeof *v->slot);
    v->mask = n_slots - 1;
    v->seed = (uint64_t)clock_ns() * 2;
    for (int i = 0; i < 256; i++) v->byte_id[i] = -1;
    for (int id = 0; id < v->n; id++) {
        size_t n;
        const char *s = vocab_text(v, id, &n);
        if (n == 0 || v->type[id] == TOKEN_UNUSED) continue;
        bool special = v->type[id] != TOKEN_NORMAL;
        int same = find_in(v, s, n, special);
        if (same >= 0)
            return err_raise(e, E_FORMAT, "tokens %d and %d are both '%.*s'", same, id, (int)n, s);
        uint64_t h = vocab_hash(v, s, n, special);
        while (v->slot[h & v->mask] >= 0) h++;
        v->slot[h & v->mask] = id;
        if (v->type[id] == TOKEN_NORMAL || v->type[id] == TOKEN_USER_DEFINED)
            v->max_bytes = max_size(v->max_bytes, n);
        if (byte_level && n == 1 && !special) v->byte_id[(uint8_t)s[0]] = id;
        if (!byte_level && v->type[id] == TOKEN_BYTE) v->byte_id[vocab_parse_byte(s, n)] = id;
    }
    return 0;
}

void vocab_deinit(struct vocab *v) {
    free(v->text);
    free(v->offset);
    free(v->type);
    free(v->score);
    free(v->slot);
    *v = (struct vocab){0};
}
