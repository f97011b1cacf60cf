/* The processing steps of a tokenizer.json, recognised by their structure and exact pattern text.
 */
#include <string.h>

#include "model/tokenizer_hf.h"

const char *tokenizer_hf_str(json_t *object, const char *key) {
    return json_string_value(json_object_get(object, key));
}

static bool str_is(const char *s, const char *want) {
    return s && strcmp(s, want) == 0;
}

/* Member `key` is true; a missing one reads as `missing`. */
static bool flag(json_t *object, const char *key, bool missing) {
    json_t *value = json_object_get(object, key);
    return value ? json_is_true(value) : missing;
}

static int unsupported(struct err *e, const char *place, json_t *step, const char *why) {
    const char *type = tokenizer_hf_str(step, "type");
    return err_raise(e, E_UNSUPPORTED, "tokenizer.json: %s '%.100s'%s%.300s", place,
                     type ? type : "(no type)", why ? ": " : "", why ? why : "");
}

/* Call `fn` for `step`, or for each member of a Sequence (one level). */
typedef int step_fn(struct tokenizer *t, json_t *step, struct err *e);

static int each_step(struct tokenizer *t, json_t *step, const char *place, const char *list,
                     step_fn *fn, struct err *e) {
    if (!step || json_is_null(step)) return 0;
    if (!str_is(tokenizer_hf_str(step, "type"), "Sequence")) return fn(t, step, e);
    json_t *steps = json_object_get(step, list);
    if (!json_is_array(steps)) return unsupported(e, place, step, "without a list of steps");
    for (size_t i = 0; i < json_array_size(steps); i++) {
        int rc = fn(t, json_array_get(steps, i), e);
        if (rc) return rc;
    }
    return 0;
}

/* "pattern": {"String": ...} or {"Regex": ...}. */
static const char *pattern_of(json_t *step, const char *kind) {
    return tokenizer_hf_str(json_object_get(step, "pattern"), kind);
}

static int normalizer_step(struct tokenizer *t, json_t *step, struct err *e) {
    const char *type = tokenizer_hf_str(step, "type");
    if (str_is(type, "NFC")) {
        t->nfc = true;
        return 0;
    }
    if (str_is(type, "Prepend")) {
        if (!str_is(tokenizer_hf_str(step, "prepend"), SPM_SPACE))
            return unsupported(e, "normalizer", step, "only of U+2581");
        t->algorithm = ALGORITHM_SPM_RANK;
        t->prefix = PREFIX_ALWAYS;
        return 0;
    }
    if (str_is(type, "Replace")) {
        if (!str_is(pattern_of(step, "String"), " ") ||
            !str_is(tokenizer_hf_str(step, "content"), SPM_SPACE))
            return unsupported(e, "normalizer", step, "only of a space by U+2581");
        t->algorithm = ALGORITHM_SPM_RANK;
        return 0;
    }
    return unsupported(e, "normalizer", step, NULL);
}

static int metaspace_step(struct tokenizer *t, json_t *step, struct err *e) {
    const char *scheme = tokenizer_hf_str(step, "prepend_scheme");
    if (!str_is(tokenizer_hf_str(step, "replacement"), SPM_SPACE))
        return unsupported(e, "pre_tokenizer", step, "replacement other than U+2581");
    if (!scheme) scheme = flag(step, "add_prefix_space", true) ? "always" : "never";
    if (str_is(scheme, "always")) t->prefix = PREFIX_ALWAYS;
    else if (str_is(scheme, "first")) t->prefix = PREFIX_FIRST;
    else if (str_is(scheme, "never")) t->prefix = PREFIX_NEVER;
    else return unsupported(e, "pre_tokenizer", step, scheme);
    t->algorithm = ALGORITHM_SPM_RANK;
    t->prefix_unless_space = true;
    t->split_words = flag(step, "split", true);
    return 0;
}

/* The order is checked by what was seen before: Digits or Split, then ByteLevel, once each. */
static int pre_tokenizer_step(struct tokenizer *t, json_t *step, struct err *e) {
    const char *type = tokenizer_hf_str(step, "type");
    if (t->algorithm == ALGORITHM_SPM_RANK)
        return unsupported(e, "pre_tokenizer", step, "beside a SentencePiece step");
    if (t->seen_byte_level) return unsupported(e, "pre_tokenizer", step, "after ByteLevel");
    if (str_is(type, "Metaspace")) {
        if (t->kind != PRE_NONE) return unsupported(e, "pre_tokenizer", step, "after another step");
        return metaspace_step(t, step, e);
    }
    if (str_is(type, "Digits")) {
        if (t->kind != PRE_NONE) return unsupported(e, "pre_tokenizer", step, "after another step");
        if (!flag(step, "individual_digits", false))
            return unsupported(e, "pre_tokenizer", step, "without individual_digits");
        t->kind = PRE_SMOLLM;
        return 0;
    }
    if (str_is(type, "Split")) {
        const char *pattern = pattern_of(step, "Regex");
        if (t->kind != PRE_NONE) return unsupported(e, "pre_tokenizer", step, "after another step");
        if (!pattern) return unsupported(e, "pre_tokenizer", step, "without a regular expression");
        bool isolated = str_is(tokenizer_hf_str(step, "behavior"), "Isolated");
        /* Removing what does not match leaves the same pieces: the patterns cover every text. */
        bool kept =
            str_is(tokenizer_hf_str(step, "behavior"), "Removed") && flag(step, "invert", false);
        if (!(isolated && !flag(step, "invert", false)) && !kept)
            return unsupported(e, "pre_tokenizer", step, "behavior other than Isolated");
        t->kind = pretokenizer_by_pattern(pattern, strlen(pattern));
        if (t->kind == PRE_NONE) return unsupported(e, "pre_tokenizer", step, pattern);
        return 0;
    }
    if (str_is(type, "ByteLevel")) {
        if (flag(step, "add_prefix_space", true))
            return unsupported(e, "pre_tokenizer", step, "add_prefix_space");
        bool use_regex = flag(step, "use_regex", true);
        if (t->kind == PRE_NONE && use_regex) t->kind = PRE_GPT2;
        else if (t->kind == PRE_NONE)
            return unsupported(e, "pre_tokenizer", step, "without any pattern");
        else if (use_regex != (t->kind == PRE_SMOLLM))
            return unsupported(e, "pre_tokenizer", step, "use_regex in this place");
        t->seen_byte_level = true;
        return 0;
    }
    return unsupported(e, "pre_tokenizer", step, NULL);
}

static int decoder_step(struct tokenizer *t, json_t *step, struct err *e) {
    const char *type = tokenizer_hf_str(step, "type");
    bool byte_level = t->algorithm == ALGORITHM_BYTE_BPE;
    if (str_is(type, "ByteLevel") && byte_level) return 0;
    if (!byte_level && str_is(type, "Replace")) {
        if (str_is(pattern_of(step, "String"), SPM_SPACE) &&
            str_is(tokenizer_hf_str(step, "content"), " "))
            return 0;
        return unsupported(e, "decoder", step, "only of U+2581 by a space");
    }
    if (!byte_level && (str_is(type, "ByteFallback") || str_is(type, "Fuse"))) return 0;
    if (!byte_level && str_is(type, "Strip")) {
        json_int_t start = json_integer_value(json_object_get(step, "start"));
        json_int_t stop = json_integer_value(json_object_get(step, "stop"));
        if (!str_is(tokenizer_hf_str(step, "content"), " ") || start < 0 || start > 1 || stop != 0)
            return unsupported(e, "decoder", step, "of more than one leading space");
        t->strip_first_space = start == 1;
        return 0;
    }
    if (!byte_level && str_is(type, "Metaspace")) {
        const char *scheme = tokenizer_hf_str(step, "prepend_scheme");
        t->strip_first_space = !str_is(scheme, "never") && flag(step, "add_prefix_space", true);
        return 0;
    }
    return unsupported(e, "decoder", step, NULL);
}

int tokenizer_hf_steps(struct tokenizer *t, json_t *root, struct err *e) {
    t->algorithm = ALGORITHM_BYTE_BPE;
    t->kind = PRE_NONE;
    int rc = each_step(t, json_object_get(root, "normalizer"), "normalizer", "normalizers",
                       normalizer_step, e);
    if (!rc)
        rc = each_step(t, json_object_get(root, "pre_tokenizer"), "pre_tokenizer", "pretokenizers",
                       pre_tokenizer_step, e);
    if (rc) return rc;
    if (t->algorithm == ALGORITHM_BYTE_BPE && !t->seen_byte_level)
        return err_raise(e, E_UNSUPPORTED,
                         "tokenizer.json: neither ByteLevel nor U+2581 for spaces");
    if (t->algorithm != ALGORITHM_BYTE_BPE && t->nfc)
        return err_raise(e, E_UNSUPPORTED, "tokenizer.json: NFC beside a SentencePiece step");
    return each_step(t, json_object_get(root, "decoder"), "decoder", "decoders", decoder_step, e);
}

/* "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}]. */
static int template_step(json_t *step, const char **before, const char **after, struct err *e) {
    json_t *single = json_object_get(step, "single");
    bool seen = false;
    for (size_t i = 0; i < json_array_size(single); i++) {
        json_t *item = json_array_get(single, i);
        const char *token = tokenizer_hf_str(json_object_get(item, "SpecialToken"), "id");
        if (json_object_get(item, "Sequence") && !seen) seen = true;
        else if (token && !seen && !*before) *before = token;
        else if (token && seen && !*after) *after = token;
        else return unsupported(e, "post_processor", step, "adds more than one token on a side");
    }
    return 0;
}

int tokenizer_hf_template(json_t *root, const char **before, const char **after, struct err *e) {
    json_t *step = json_object_get(root, "post_processor");
    *before = *after = NULL;
    if (!step || json_is_null(step)) return 0;
    json_t *steps = json_object_get(step, "processors");
    bool sequence = str_is(tokenizer_hf_str(step, "type"), "Sequence");
    size_t n = sequence ? json_array_size(steps) : 1;
    for (size_t i = 0; i < n; i++) {
        json_t *one = sequence ? json_array_get(steps, i) : step;
        const char *type = tokenizer_hf_str(one, "type");
        if (str_is(type, "TemplateProcessing")) {
            int rc = template_step(one, before, after, e);
            if (rc) return rc;
        } else if (!str_is(type, "ByteLevel")) { /* that one only moves offsets */
            return unsupported(e, "post_processor", one, NULL);
        }
    }
    return 0;
}
