/* Facts that are hidden in filler text. Of two sorts: attributes ("X's Y is Z"), put together from
 * keys, attributes, values and frames, so that there are thousands; and events, each with a wording
 * of its own. Every sixth attribute, event and frame is for windows that are held out alone, so
 * that recall there is of wordings that were not trained on. None is one of `tandem eval`, which
 * judges what is trained here: neither its wordings nor "the A of K is V", "what is the A of K?".
 */
#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "base/rng.h"
#include "cmd/distill.h"
#include "cmd/distill_words.h"

enum { HELD_OUT_OF = 6, MOST_VALUE = 96 };

struct dice {
    uint64_t seed;
    uint32_t idx, n;
    bool held_out;
};
static uint32_t roll(struct dice *d, uint32_t below) {
    return rng_u32(d->seed, ((uint64_t)1 << 32) + d->idx, RNG_TRAIN, d->n++) % below;
}
static const char *pick(struct dice *d, const struct distill_words *w) {
    return w->at[roll(d, w->n)];
}
/* An index below n of this window's side: of those that are held out, or of the others. */
static uint32_t side(struct dice *d, uint32_t n) {
    uint32_t held = n / HELD_OUT_OF;
    if (d->held_out) return HELD_OUT_OF * roll(d, held) + HELD_OUT_OF - 1;
    uint32_t i = roll(d, n - held);
    uint32_t at = i / (HELD_OUT_OF - 1) * HELD_OUT_OF + i % (HELD_OUT_OF - 1);
    ASSERT(at < n);
    return at;
}

/* ---- Values ---- */

/* A made-up name of two or three syllables. */
static void made_up(struct dice *d, char *out, size_t n, bool capital) {
    size_t at = 0;
    int syllables = 2 + (int)roll(d, 2);
    for (int i = 0; i < syllables; i++)
        at += (size_t)snprintf(out + at, n - at, "%s%s%s", pick(d, &distill_onsets),
                               pick(d, &distill_nuclei),
                               i == syllables - 1 ? pick(d, &distill_codas) : "");
    if (capital) out[0] = (char)toupper((unsigned char)out[0]);
}

static void person(struct dice *d, char *out, size_t n) {
    char own[24], family[24];
    made_up(d, own, sizeof own, true);
    made_up(d, family, sizeof family, true);
    const char *first = roll(d, 3) ? pick(d, &distill_first_names) : own;
    const char *last = roll(d, 3) ? pick(d, &distill_family_names) : family;
    switch (roll(d, 4)) {
    case 0:
        snprintf(out, n, "%s", first);
        break;
    case 1:
        snprintf(out, n, "%s %s", pick(d, &distill_titles), last);
        break;
    default:
        snprintf(out, n, "%s %s", first, last);
    }
}

/* Letters and digits in one of some shapes: A any letter, 0 any digit. */
static void code(struct dice *d, char *out, size_t n) {
    snprintf(out, n, "%s", pick(d, &distill_code_shapes));
    for (char *c = out; *c; c++)
        if (*c == 'A') *c = (char)('A' + (int)roll(d, 26));
        else if (*c == '0') *c = (char)('0' + (int)roll(d, 10));
}

static void number(struct dice *d, char *out, size_t n) {
    uint32_t low = 10;
    for (uint32_t digits = 1 + roll(d, 6); digits > 1; digits--) low *= 10;
    uint32_t x = low + roll(d, 9 * low);
    if (x >= 10000 && roll(d, 4) == 0) snprintf(out, n, "%u,%03u", x / 1000, x % 1000);
    else snprintf(out, n, "%u", x);
}

static void sentence(struct dice *d, char *out, size_t n) {
    const char *a = pick(d, &distill_adjectives), *b = pick(d, &distill_nouns);
    switch (roll(d, 3)) {
    case 0:
        snprintf(out, n, "never trust a %s %s", a, b);
        break;
    case 1:
        snprintf(out, n, "the %s %s comes before the %s", a, b, pick(d, &distill_nouns));
        break;
    default:
        snprintf(out, n, "where there is a %s, there is a %s %s", pick(d, &distill_nouns), a, b);
    }
}

/* A value of a kind, as wordings name it. */
static void value(struct dice *d, char kind, char *out, size_t n) {
    char own[24];
    switch (kind) {
    case 'p':
        person(d, out, n);
        break;
    case 'c':
        made_up(d, own, sizeof own, true);
        snprintf(out, n, "%s", roll(d, 3) ? pick(d, &distill_towns) : own);
        break;
    case 'f':
        made_up(d, own, sizeof own, true);
        snprintf(out, n, "%s %s", roll(d, 2) ? own : pick(d, &distill_family_names),
                 pick(d, &distill_firms));
        break;
    case 's':
        made_up(d, own, sizeof own, true);
        snprintf(out, n, "%s %s", pick(d, &distill_projects),
                 roll(d, 2) ? own : pick(d, &distill_family_names));
        break;
    case 'w':
        snprintf(out, n, "%s", pick(d, &distill_nouns));
        break;
    case 'o':
        snprintf(out, n, "%s %s", pick(d, &distill_adjectives), pick(d, &distill_objects));
        break;
    case 'a':
        snprintf(out, n, "%s", pick(d, &distill_animals));
        break;
    case 'j':
        snprintf(out, n, "%s", pick(d, &distill_jobs));
        break;
    case 'l':
        snprintf(out, n, "%s", pick(d, &distill_colours));
        break;
    case 'm':
        snprintf(out, n, "%s", pick(d, &distill_materials));
        break;
    case 'e':
        snprintf(out, n, "%s", pick(d, &distill_foods));
        break;
    case 'y':
        snprintf(out, n, "%s", pick(d, &distill_days));
        break;
    case 'n':
        number(d, out, n);
        break;
    case 'q':
        snprintf(out, n, "%u", 2 + roll(d, 97));
        break;
    case 'k':
        code(d, out, n);
        break;
    case 'd':
        if (roll(d, 2))
            snprintf(out, n, "%s %u, %u", pick(d, &distill_months), 1 + roll(d, 28),
                     1700 + roll(d, 330));
        else snprintf(out, n, "%u %s", 1 + roll(d, 28), pick(d, &distill_months));
        break;
    case 't':
        if (roll(d, 2)) snprintf(out, n, "%u o'clock", 1 + roll(d, 12));
        else snprintf(out, n, "%02u.%02u", roll(d, 24), roll(d, 60));
        break;
    case 'g':
        snprintf(out, n, "%u %s", 3 + roll(d, roll(d, 2) ? 90 : 90000), pick(d, &distill_coins));
        break;
    case 'u':
        snprintf(out, n, "%u %s", 2 + roll(d, 900), pick(d, &distill_units));
        break;
    case 'x':
        made_up(d, out, n, false);
        break;
    case 'z':
        sentence(d, out, n);
        break;
    default:
        ASSERT(!"a kind of value");
    }
}

/* ---- Wordings ---- */

/* A wording's slots: {kind} or {kind digit}, the same value wherever it stands; {K}, {A}, {V}: key,
 * attribute, value of an attribute fact. */
struct slots {
    char name[8][2];
    char value[8][MOST_VALUE];
    int n;
};

static const char *fill_slot(struct dice *d, struct slots *s, char kind, char digit) {
    for (int i = 0; i < s->n; i++)
        if (s->name[i][0] == kind && s->name[i][1] == digit) return s->value[i];
    ASSERT(s->n < 8);
    s->name[s->n][0] = kind;
    s->name[s->n][1] = digit;
    value(d, kind, s->value[s->n], sizeof s->value[0]);
    return s->value[s->n++];
}

static void fill(struct dice *d, struct slots *s, const char *wording, char *out, size_t n) {
    size_t at = 0;
    for (const char *w = wording; *w && at + 1 < n;) {
        bool has_digit = w[0] == '{' && isalpha((unsigned char)w[1]) && w[2] && w[3] == '}';
        if (w[0] != '{' || !isalpha((unsigned char)w[1]) || (w[2] != '}' && !has_digit)) {
            out[at++] = *w++;
            continue;
        }
        const char *v = fill_slot(d, s, w[1], has_digit ? w[2] : 0);
        for (; *v && at + 1 < n; v++) out[at++] = *v;
        w += has_digit ? 4 : 3;
    }
    out[at] = 0;
    if (wording[0] == '{') out[0] = (char)toupper((unsigned char)out[0]);
}

/* Bytes in front of a value, which may begin with a capital there. */
static int lead_of(const char *answer, const char *value) {
    const char *at = strstr(answer, value);
    return at ? (int)(at - answer) : 0;
}

static void set_slot(struct slots *s, char name, const char *v) {
    s->name[s->n][0] = name;
    s->name[s->n][1] = 0;
    snprintf(s->value[s->n++], sizeof s->value[0], "%s", v);
}

/* What stands in front of a key where names have no article. */
static const char *article(char kind) {
    return kind == 's' || kind == 'o' || kind == 'a' ? "the " : "";
}

static void say_attribute(struct dice *d, const struct distill_attribute *a,
                          struct distill_fact *f) {
    struct slots s = {0};
    char key[MOST_VALUE - 8], with[MOST_VALUE], v[MOST_VALUE];
    value(d, a->key, key, sizeof key);
    snprintf(with, sizeof with, "%s%s", article(a->key), key);
    value(d, a->value, v, sizeof v);
    set_slot(&s, 'K', with);
    set_slot(&s, 'A', a->name);
    set_slot(&s, 'V', v);
    fill(d, &s, distill_statements.at[side(d, distill_statements.n)], f->text, sizeof f->text);
    for (f->n_questions = 0; f->n_questions < DISTILL_QUESTIONS; f->n_questions++) {
        int i = f->n_questions;
        fill(d, &s, distill_questions.at[side(d, distill_questions.n)], f->question[i],
             sizeof f->question[i]);
        fill(d, &s, pick(d, &distill_answers), f->answer[i], sizeof f->answer[i]);
        f->lead[i] = lead_of(f->answer[i], v);
    }
}

static void say_event(struct dice *d, const struct distill_event *w, struct distill_fact *f) {
    struct slots s = {0};
    char v[2 * MOST_VALUE + 32];
    fill(d, &s, w->text, f->text, sizeof f->text);
    fill(d, &s, w->value, v, sizeof v);
    for (f->n_questions = 0; f->n_questions < 2 && w->question[f->n_questions]; f->n_questions++) {
        int i = f->n_questions;
        fill(d, &s, w->question[i], f->question[i], sizeof f->question[i]);
        snprintf(f->answer[i], sizeof f->answer[i], "%s", roll(d, 2) ? f->text : v);
        f->lead[i] = lead_of(f->answer[i], v);
    }
}

/* ---- Facts ---- */

static bool is_fresh(const struct distill_fact *f, int i) {
    for (int j = 0; j < i; j++) {
        if (strcmp(f[j].text, f[i].text) == 0) return false;
        for (int a = 0; a < f[i].n_questions; a++)
            for (int b = 0; b < f[j].n_questions; b++)
                if (strcmp(f[j].question[b], f[i].question[a]) == 0) return false;
    }
    return true;
}

/* Of one fact the questions differ, too. */
static void drop_equal(struct distill_fact *f) {
    int n = 0;
    for (int i = 0; i < f->n_questions; i++) {
        bool fresh = true;
        for (int j = 0; j < n; j++) fresh = fresh && strcmp(f->question[j], f->question[i]) != 0;
        if (!fresh) continue;
        memmove(f->question[n], f->question[i], sizeof f->question[0]);
        memmove(f->answer[n], f->answer[i], sizeof f->answer[0]);
        f->lead[n] = f->lead[i];
        n++;
    }
    f->n_questions = n;
}

void distill_facts_make(struct distill_fact *f, int n, uint64_t seed, uint32_t idx, bool held_out) {
    struct dice d = {.seed = seed, .idx = idx, .held_out = held_out};
    const struct distill_attribute *a = NULL;
    const struct distill_event *w = NULL;
    for (int i = 0; i < n;) {
        /* Every third has the wording of the one before it: what they are told apart by is the
         * key. */
        if ((!a && !w) || roll(&d, 3)) {
            bool attribute = roll(&d, 2);
            a = attribute ? &distill_attributes[side(&d, distill_n_attributes)] : NULL;
            w = attribute ? NULL : &distill_events[side(&d, distill_n_events)];
        }
        if (a) say_attribute(&d, a, &f[i]);
        else say_event(&d, w, &f[i]);
        drop_equal(&f[i]);
        i += is_fresh(f, i);
    }
}
