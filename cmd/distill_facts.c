/* Facts that are hidden in filler text. Names are put together from syllables, so that there are
 * many and none can be guessed; wordings and words are others than those of `tandem eval`, which
 * judges what is trained here. */
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "base/rng.h"
#include "cmd/distill.h"

#define COUNT(list) ((uint32_t)(sizeof(list) / sizeof((list)[0])))

static const char *const onset[] = {"b", "br", "d", "dr", "f", "g", "gl", "h", "k",  "kr",
                                    "l", "m",  "n", "p",  "r", "s", "st", "t", "tr", "v"};
static const char *const nucleus[] = {"a", "e", "i", "o", "u", "ai", "ea", "io"};
static const char *const coda[] = {"", "", "", "l", "n", "r", "s", "th", "nd", "x"};
static const char *const animals[] = {"badger", "canary", "ferret", "goat",   "hamster", "lizard",
                                      "owl",    "parrot", "pony",   "rabbit", "terrier", "turtle"};
static const char *const colours[] = {"amber", "black", "copper", "crimson", "golden", "green",
                                      "grey",  "ivory", "purple", "scarlet", "teal",   "white"};
static const char *const objects[] = {"atlas",  "candlestick", "drill",      "globe",  "hammer",
                                      "kettle", "lantern",     "ledger",     "mirror", "projector",
                                      "scale",  "teapot",      "typewriter", "vase",   "wrench"};
static const char *const days[] = {"Monday", "Tuesday",  "Wednesday", "Thursday",
                                   "Friday", "Saturday", "Sunday"};
static const char *const months[] = {"January",   "February", "March",    "April",
                                     "May",       "June",     "July",     "August",
                                     "September", "October",  "November", "December"};

struct dice {
    uint64_t seed;
    uint32_t idx, n;
};
static uint32_t roll(struct dice *d, uint32_t below) {
    return rng_u32(d->seed, ((uint64_t)1 << 32) + d->idx, RNG_TRAIN, d->n++) % below;
}
static const char *pick(struct dice *d, const char *const *list, uint32_t n) {
    return list[roll(d, n)];
}

/* A made-up name of two or three syllables. */
static void name(struct dice *d, char *out, size_t n, bool capital) {
    size_t at = 0;
    int syllables = 2 + (int)roll(d, 2);
    for (int i = 0; i < syllables; i++)
        at += (size_t)snprintf(out + at, n - at, "%s%s%s", pick(d, onset, COUNT(onset)),
                               pick(d, nucleus, COUNT(nucleus)),
                               i == syllables - 1 ? pick(d, coda, COUNT(coda)) : "");
    if (capital && out[0] >= 'a' && out[0] <= 'z') out[0] = (char)(out[0] - 'a' + 'A');
}

enum { N_WORDINGS = 8 };

static void say(struct dice *d, struct distill_fact *f) {
    char key[40], value[40], second[40];
    const size_t n = sizeof f->text;
    name(d, key, sizeof key, true);
    name(d, second, sizeof second, true);
    const char *animal = pick(d, animals, COUNT(animals)),
               *colour = pick(d, colours, COUNT(colours));
    const char *object = pick(d, objects, COUNT(objects)), *day = pick(d, days, COUNT(days));
    const char *month = pick(d, months, COUNT(months));
    switch (roll(d, N_WORDINGS)) {
    case 0:
        snprintf(value, sizeof value, "%u", 100000 + roll(d, 900000));
        snprintf(f->text, n, "The badge number of %s %s is %s.", key, second, value);
        snprintf(f->question, n, "What is the badge number of %s %s?", key, second);
        snprintf(f->answer, n, "The badge number of %s %s is %s.", key, second, value);
        break;
    case 1:
        name(d, value, sizeof value, false);
        snprintf(f->text, n, "The code word of operation %s is \"%s\".", key, value);
        snprintf(f->question, n, "What is the code word of operation %s?", key);
        snprintf(f->answer, n, "The code word of operation %s is \"%s\".", key, value);
        break;
    case 2:
        snprintf(f->text, n, "%s keeps a %s called %s.", key, animal, second);
        snprintf(f->question, n, "What is the name of the %s that %s keeps?", animal, key);
        snprintf(f->answer, n, "%s", second);
        break;
    case 3:
        snprintf(value, sizeof value, "%s at %u o'clock", day, 1 + roll(d, 12));
        snprintf(f->text, n, "The meeting with %s was moved to %s.", key, value);
        snprintf(f->question, n, "To when was the meeting with %s moved?", key);
        snprintf(f->answer, n, "It was moved to %s.", value);
        break;
    case 4:
        snprintf(key, sizeof key, "%c%u", 'A' + (int)roll(d, 26), 10 + roll(d, 90));
        snprintf(f->text, n, "On shelf %s stands the %s %s.", key, colour, object);
        snprintf(f->question, n, "What stands on shelf %s?", key);
        snprintf(f->answer, n, "On shelf %s stands the %s %s.", key, colour, object);
        break;
    case 5:
        snprintf(value, sizeof value, "%u", 1000 + roll(d, 9000));
        snprintf(f->text, n, "The invoice of %s & %s amounts to %s euros.", key, second, value);
        snprintf(f->question, n, "How much is the invoice of %s & %s?", key, second);
        snprintf(f->answer, n, "%s euros", value);
        break;
    case 6:
        snprintf(value, sizeof value, "%s %u", month, 1 + roll(d, 28));
        snprintf(f->text, n, "The festival of %s begins on %s.", key, value);
        snprintf(f->question, n, "On which date does the festival of %s begin?", key);
        snprintf(f->answer, n, "The festival of %s begins on %s.", key, value);
        break;
    default:
        snprintf(f->text, n, "Doctor %s has painted the door of room %u %s.", key,
                 100 + roll(d, 900), colour);
        snprintf(f->question, n, "Which colour did Doctor %s paint a door?", key);
        snprintf(f->answer, n, "%s", colour);
    }
}

void distill_facts_make(struct distill_fact *f, int n, uint64_t seed, uint32_t idx) {
    struct dice d = {.seed = seed, .idx = idx};
    for (int i = 0; i < n;) {
        bool fresh = true;
        say(&d, &f[i]);
        for (int j = 0; j < i; j++) fresh = fresh && strcmp(f[j].question, f[i].question) != 0;
        i += fresh;
    }
}
