/* Patterns that cut a text before byte-level BPE. The engine is PCRE2, the patterns were written
 * for Oniguruma; two things differ and are spelled out here: \s is Unicode's White_Space (PCRE2
 * adds U+180E), and letters and numbers are those of a newer Unicode. The digits-first step of
 * SmolLM is folded into one pattern. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "model/pretokenize_new.h"
#include "model/tokenizer_private.h"

/* White_Space, for use inside a class. */
#define WS                                                                                         \
    "\\x{09}-\\x{0d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}"           \
    "\\x{202f}\\x{205f}\\x{3000}"
#define L "\\p{L}" NEW_UPPER NEW_LOWER NEW_CASELESS
#define N "\\p{N}" NEW_NUMBERS
#define UPPER "\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}" NEW_UPPER NEW_CASELESS NEW_MARKS
#define LOWER "\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}" NEW_LOWER NEW_CASELESS NEW_MARKS

#define CONTRACTIONS "'(?:[stmd]|re|ve|ll)"
#define CONTRACTIONS_ANY_CASE "(?i:" CONTRACTIONS ")"
#define SPACES "[" WS "]+(?![^" WS "])|[" WS "]+"
#define WORD "[^\\r\\n" L N "]?[" L "]+"
#define SYMBOLS " ?[^" WS L N "]+"
#define NEWLINES "[" WS "]*[\\r\\n]+"

/* `ours` is what PCRE2 compiles; `theirs` the exact text in a tokenizer.json (source: those files
 * of Llama 3, Qwen2 and Mistral Nemo; GPT-2's is built into the ByteLevel step there). */
static const struct {
    const char *name, *ours, *theirs;
} patterns[PRE_N_KINDS] = {
    [PRE_NONE] = {"none", NULL, NULL},
    [PRE_GPT2] =
        {"gpt-2", CONTRACTIONS "| ?[" L "]+| ?[" N "]+|" SYMBOLS "|" SPACES,
         "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"},
    [PRE_LLAMA3] = {"llama-bpe",
                    CONTRACTIONS_ANY_CASE "|" WORD "|[" N "]{1,3}|" SYMBOLS "[\\r\\n]*|" NEWLINES
                                          "|" SPACES,
                    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}"
                    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"},
    [PRE_QWEN2] = {"qwen2",
                   CONTRACTIONS_ANY_CASE "|" WORD "|[" N "]|" SYMBOLS "[\\r\\n]*|" NEWLINES
                                         "|" SPACES,
                   "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}"
                   "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"},
    /* Two steps in the files: every \p{N} apart, then GPT-2's pattern inside the pieces between. A
     * piece ends before a digit, so a run of spaces there is taken whole as if the text ended. */
    [PRE_SMOLLM] = {"smollm",
                    "[" N NEWEST_DIGITS "]|" CONTRACTIONS "| ?[" L "]+| ?[^" WS L N NEWEST_DIGITS
                    "]+|[" WS "]+(?![^" WS N NEWEST_DIGITS "])|[" WS "]+",
                    NULL},
    [PRE_TEKKEN] = {"tekken",
                    "[^\\r\\n" L N "]?[" UPPER "]*[" LOWER "]+|[^\\r\\n" L N "]?[" UPPER "]+[" LOWER
                    "]*|[" N "]|" SYMBOLS "[\\r\\n/]*|" NEWLINES "|" SPACES,
                    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*"
                    "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+|[^\\r\\n\\p{L}\\p{N}]?"
                    "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*|\\p{N}"
                    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"},
};

struct pretokenizer {
    pcre2_code *code;
    bool jit;
};

enum pretokenizer_kind pretokenizer_by_pattern(const char *pattern, size_t n) {
    for (int k = 0; k < PRE_N_KINDS; k++) {
        const char *theirs = patterns[k].theirs;
        if (theirs && strlen(theirs) == n && memcmp(theirs, pattern, n) == 0) return k;
    }
    return PRE_NONE;
}

int pretokenizer_open(struct pretokenizer **out, enum pretokenizer_kind kind, struct err *e) {
    const char *pattern = patterns[kind].ours;
    ASSERT(pattern);
    struct pretokenizer *p = calloc(1, sizeof *p);
    if (!p) return err_raise(e, E_NOMEM, "pre-tokenizer");
    int code = 0;
    PCRE2_SIZE at = 0;
    p->code = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED,
                            PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED | PCRE2_NEVER_BACKSLASH_C, &code,
                            &at, NULL);
    if (!p->code) {
        free(p);
        return err_raise(e, code == PCRE2_ERROR_HEAP_FAILED ? E_NOMEM : E_UNSUPPORTED,
                         "pre-tokenizer %s: pcre2 error %d at %zu", patterns[kind].name, code,
                         (size_t)at);
    }
    p->jit = pcre2_jit_compile(p->code, PCRE2_JIT_COMPLETE) == 0;
    *out = p;
    return 0;
}

void pretokenizer_close(struct pretokenizer *p) {
    if (!p) return;
    pcre2_code_free(p->code);
    free(p);
}

static int match_at(const struct pretokenizer *p, const char *text, size_t n, size_t at,
                    pcre2_match_data *data, pcre2_match_context *context) {
    int rc = PCRE2_ERROR_JIT_STACKLIMIT;
    if (p->jit) /* text is valid UTF-8: no check needed */
        rc = pcre2_jit_match(p->code, (PCRE2_SPTR)text, n, at, PCRE2_ANCHORED, data, context);
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT || rc == PCRE2_ERROR_JIT_BADOPTION)
        rc = pcre2_match(p->code, (PCRE2_SPTR)text, n, at,
                         PCRE2_ANCHORED | PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, data, context);
    return rc;
}

int pretokenizer_split(const struct pretokenizer *p, const char *text, size_t n,
                       pretokenizer_fn *fn, void *arg, struct err *e) {
    pcre2_match_data *data = pcre2_match_data_create(1, NULL);
    pcre2_match_context *context = pcre2_match_context_create(NULL);
    int rc = 0;
    if (!data || !context) {
        rc = err_raise(e, E_NOMEM, "pre-tokenizer");
        goto done;
    }
    /* Our patterns step back at most once a character, so the limit is the text's length and a
     * margin: reaching it is a bug of the pattern, told as an error instead of a hang. */
    pcre2_set_match_limit(context, (uint32_t)min_size(UINT32_MAX, 100000 + 16 * n));
    pcre2_set_depth_limit(context, 100000);
    pcre2_set_heap_limit(context, 1 << 17);
    for (size_t at = 0; at < n;) {
        int got = match_at(p, text, n, at, data, context);
        if (got < 0) {
            rc = err_raise(e, E_TOO_LONG, "pre-tokenizer gave up at byte %zu of %zu (pcre2 %d)", at,
                           n, got);
            goto done;
        }
        size_t end = pcre2_get_ovector_pointer(data)[1];
        ASSERT(end > at && end <= n);
        rc = fn(arg, text + at, end - at, e);
        if (rc) goto done;
        at = end;
    }
done:
    pcre2_match_data_free(data);
    pcre2_match_context_free(context);
    return rc;
}
