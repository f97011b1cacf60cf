/* Needles: each prompt is computed once and answered by every column. */
#include <string.h>

#include "base/err.h"
#include "base/rng.h"
#include "cmd/eval_run.h"

/* The index-th prompt: lengths turn fastest, then depths, then kinds, so that time may end
 * anywhere; the same needle is asked for at every length. */
struct place {
    int length, depth, text;
    uint32_t needle;
    enum eval_needle_kind kind;
};

static struct place place_of(const struct eval_find_options *o, const struct eval_texts *texts,
                             int i) {
    int j = i / o->n_lengths, a = o->n_depths, b = o->n_kinds;
    while (b) { /* greatest common divisor */
        int rest = a % b;
        a = b;
        b = rest;
    }
    int round = o->n_depths / a * o->n_kinds; /* of pairs, until the first comes again */
    return (struct place){
        .length = i % o->n_lengths,
        .depth = j % o->n_depths,
        .kind = o->kind[(j + j / round) % o->n_kinds],
        .needle = (uint32_t)j,
        .text = (int)(rng_u32(o->seed, (uint64_t)j, RNG_EVAL, 3000) % (uint32_t)texts->n)};
}

struct prompt {
    struct tokens ids;
    int32_t lead[EVAL_FOLLOWING + EVAL_QUESTION_TOKENS]; /* forced in front of the answer */
    int n_lead, n_late;                                  /* of which the last are the question */
};

/* A late fact comes up behind n_late tokens of the text that goes on. */
static int write_lead(struct eval_bed *b, const struct eval_text *v, int from,
                      const struct eval_needle *needle, int n_late, struct prompt *p,
                      struct err *e) {
    struct strbuf s = {0};
    struct tokens q = {.limit = EVAL_QUESTION_TOKENS};
    ASSERT(n_late <= EVAL_FOLLOWING && (size_t)(from + n_late) <= v->ids.n);
    memcpy(p->lead, v->ids.ids + from, sizeof *p->lead * (size_t)n_late);
    /* The fact's own sentence up to the value, which ends it: the answer comes to speak of it. */
    const char *fact = needle->fact[0].text, *value = strstr(fact, needle->value);
    ASSERT(value && value > fact);
    strbuf_printf(&s, "\n\n%.*s", (int)(value - fact - 1), fact);
    int rc = tokenizer_encode(b->tokenizer, s.data, s.n, 0, &q, e);
    if (!rc) memcpy(p->lead + n_late, q.ids, sizeof *p->lead * q.n);
    p->n_late = n_late;
    p->n_lead = rc ? 0 : n_late + (int)q.n;
    strbuf_deinit(&s);
    tokens_deinit(&q);
    return rc;
}

static int write_prompt(struct eval_bed *b, const struct eval_texts *texts,
                        const struct eval_find_options *o, const struct place *at,
                        const struct eval_needle *needle, struct prompt *p, struct err *e) {
    const struct eval_text *v = &texts->at[at->text];
    int n = o->length[at->length], n_used;
    int n_late = at->kind == EVAL_NEEDLE_LATE ? o->n_late : 0;
    int first = eval_text_place(v, n + o->n_late, o->seed, at->needle);
    p->ids.n = 0;
    p->n_lead = p->n_late = 0;
    int rc = eval_prompt_needle(&b->speech, v, first, needle, n, &p->ids, &n_used, e);
    if (!rc && at->kind == EVAL_NEEDLE_LATE)
        rc = write_lead(b, v, first + n_used, needle, n_late, p, e);
    return rc;
}

int eval_find_prompt(struct eval_bed *b, const struct eval_texts *texts,
                     const struct eval_find_options *o, int i, struct tokens *out, struct err *e) {
    struct place at = place_of(o, texts, i);
    struct eval_needle needle;
    struct prompt p = {.ids = *out};
    eval_needle_make(&needle, at.kind, o->seed, at.needle, o->depth[at.depth]);
    int rc = write_prompt(b, texts, o, &at, &needle, &p, e);
    *out = p.ids;
    return rc;
}

/* The oracle looks at what dense says (or, where it says nothing, at what it should), of a late
 * question at the question, too. */
static int look(struct eval_bed *b, const struct eval_find_options *o, const struct prompt *p,
                const struct eval_needle *needle, struct err *e) {
    int32_t ids[TARGET_TRACE_LOOK], answer[EVAL_FOLLOWING];
    int n = p->n_lead - p->n_late, n_answer;
    memcpy(ids, p->lead + p->n_late, sizeof *ids * (size_t)n);
    int rc = eval_answer_dense(b, p->lead, p->n_lead, o->n_answer, answer, &n_answer, e);
    for (int i = 0; i < n_answer && n < TARGET_TRACE_LOOK; i++) ids[n++] = answer[i];
    if (!rc && n == 0) {
        struct tokens t = {0};
        rc = tokenizer_encode(b->tokenizer, needle->value, strlen(needle->value), 0, &t, e);
        while (!rc && n < (int)t.n && n < TARGET_TRACE_LOOK) {
            ids[n] = t.ids[n];
            n++;
        }
        tokens_deinit(&t);
    }
    return rc ? rc : eval_bed_look(b, p->lead, p->n_late, ids, n, NULL, e);
}

static void write_answers(FILE *f, const struct eval_columns *columns,
                          const struct eval_needle *needle, const struct eval_found *item,
                          const char *text_name, const struct strbuf *text) {
    struct strbuf s = {0};
    strbuf_printf(&s, "{\"kind\": \"%s\", \"tokens\": %d, \"depth\": %.3f, \"text\": ",
                  eval_needle_kind_name(needle->kind), item->n_tokens, needle->fact[0].depth);
    strbuf_append_json(&s, text_name, strlen(text_name));
    strbuf_append_str(&s, ", \"fact\": ");
    strbuf_append_json(&s, needle->fact[0].text, strlen(needle->fact[0].text));
    strbuf_append_str(&s, ", \"question\": ");
    strbuf_append_json(&s, needle->question, strlen(needle->question));
    strbuf_append_str(&s, ", \"value\": ");
    strbuf_append_json(&s, needle->value, strlen(needle->value));
    eval_write_answers(f, &s, columns, text);
}

static int find_one(struct eval_bed *b, const struct eval_columns *columns,
                    const struct eval_texts *texts, const struct eval_find_options *o, int i,
                    struct prompt *p, struct strbuf *text, struct eval_found *item, struct err *e) {
    struct place at = place_of(o, texts, i);
    struct eval_needle needle;
    eval_needle_make(&needle, at.kind, o->seed, at.needle, o->depth[at.depth]);
    int rc = write_prompt(b, texts, o, &at, &needle, p, e);
    int n = (int)p->ids.n;
    if (!rc) rc = eval_bed_prompt(b, columns, p->ids.ids, n, o->seed + at.needle, e);
    if (!rc && eval_columns_have(columns, EVAL_ORACLE)) rc = look(b, o, p, &needle, e);
    if (!rc) rc = eval_bed_select(b, columns, e);
    if (rc) return rc;
    rc = eval_answer_all(b, columns, p->lead, p->n_lead, o->n_answer, text, e);
    if (rc) return rc;
    *item = (struct eval_found){.length = at.length,
                                .depth = at.depth,
                                .kind = at.kind,
                                .text = at.text,
                                .n_tokens = n,
                                .n_blocks = target_n_blocks(n)};
    for (int c = 0; c < columns->n; c++) {
        item->right[c] = eval_says(text[c].data, needle.value);
        item->n_kept[c] = c ? b->n_kept[c] : item->n_blocks;
    }
    if (o->answers)
        write_answers(o->answers, columns, &needle, item, texts->at[at.text].name, text);
    return 0;
}

int eval_find(struct eval_bed *b, const struct eval_columns *columns,
              const struct eval_texts *texts, const struct eval_find_options *o,
              const struct eval_clock *clock, struct eval_found *items, int *n_items,
              struct err *e) {
    struct prompt p = {0};
    struct strbuf text[EVAL_MAX_COLUMNS] = {{0}};
    struct log_progress bar;
    struct eval_progress progress;
    int n = o->n * o->n_lengths, rc = 0;
    *n_items = 0;
    eval_progress_start(&progress, &bar, "needles", n);
    for (int i = 0; i < n && !rc && !eval_clock_is_up(clock); i++) {
        rc = find_one(b, columns, texts, o, i, &p, text, &items[i], e);
        if (!rc) eval_progress_at(&progress, ++*n_items);
    }
    eval_progress_end(&progress);
    tokens_deinit(&p.ids);
    for (int i = 0; i < columns->n; i++) strbuf_deinit(&text[i]);
    return rc;
}
