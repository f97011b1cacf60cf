#include "cmd/eval_needle.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "base/rng.h"

const char *eval_needle_kind_name(enum eval_needle_kind kind) {
    static const char *const names[EVAL_N_NEEDLE_KINDS] = {"single", "many", "two-hop", "late"};
    return names[kind];
}

/* ---- Words ---- */

static const char *const people[] = {
    "Amara",  "Bogdan", "Chiara", "Dmitri", "Eskil",  "Farida", "Gonzalo", "Hamid",
    "Ingrid", "Joonas", "Kwame",  "Leila",  "Milan",  "Nadia",  "Oksana",  "Priya",
    "Rashid", "Sanjay", "Tomasz", "Ulrika", "Vikram", "Wanda",  "Yusuf",   "Zelda",
};
static const char *const towns[] = {
    "Aarhus", "Bergen",  "Cairo",   "Dakar", "Essen",   "Fukuoka", "Genoa",  "Hanoi",
    "Izmir",  "Jakarta", "Kyoto",   "Lima",  "Malmo",   "Nairobi", "Oslo",   "Porto",
    "Quito",  "Riga",    "Seville", "Tunis", "Utrecht", "Vilnius", "Warsaw", "Zagreb",
};
static const char *const rooms[] = {
    "archive",     "boiler room",  "cloakroom",   "darkroom", "engine room", "greenhouse",
    "laboratory",  "mail room",    "observatory", "pantry",   "print shop",  "radio room",
    "server room", "storage room", "tea room",    "workshop",
};
static const char *const words[] = {
    "albatross", "blizzard",  "cinnamon", "dragonfly", "eclipse",  "flamingo",
    "gazelle",   "hurricane", "iceberg",  "jasmine",   "kangaroo", "lavender",
    "magnolia",  "nightfall", "orchid",   "pelican",   "quartz",   "rhubarb",
    "saffron",   "tornado",   "umbrella", "volcano",   "walnut",   "zeppelin",
};
static const char *const things[] = {
    "brass compass", "chess set",    "fishing rod",    "glass marble",   "hand drum",  "ivory comb",
    "oil painting",  "pocket radio", "sewing machine", "silver thimble", "snow globe", "violin",
    "wooden flute",  "yellow kite",  "clay jug",       "music box",
};
static const char *const places[] = {
    "attic",   "bakery",     "barn",   "basement", "canteen", "chapel",  "garage", "harbour",
    "library", "lighthouse", "museum", "pharmacy", "stable",  "theatre", "tunnel", "windmill",
};
static const char *const fruits[] = {
    "apricot", "banana", "cherry", "coconut", "fig",       "grape",  "guava",  "kiwi",
    "lemon",   "lychee", "mango",  "melon",   "nectarine", "papaya", "quince", "tangerine",
};

/* Draws of one needle, counted so that each is another. */
struct dice {
    uint64_t seed;
    uint32_t index, n;
};
static uint32_t roll(struct dice *d, uint32_t below) {
    return rng_u32(d->seed, d->index, RNG_EVAL, d->n++) % below;
}
#define COUNT(list) ((uint32_t)(sizeof(list) / sizeof((list)[0])))

/* n different entries of a list of `size`. */
static void pick(struct dice *d, const char *const *list, uint32_t size, int n, const char **out) {
    ASSERT(n <= (int)size);
    for (int i = 0; i < n;) {
        const char *word = list[roll(d, size)];
        bool fresh = true;
        for (int j = 0; j < i; j++) fresh = fresh && out[j] != word;
        if (fresh) out[i++] = word;
    }
}

/* ---- Wordings ---- */

enum { NUMBER, PASSWORD, PLACE, FRUIT, TRAIN, N_WORDINGS };

/* Keys, and things that belong to them, of up to EVAL_NEEDLE_FACTS facts. */
struct material {
    const char *key[EVAL_NEEDLE_FACTS], *thing[EVAL_NEEDLE_FACTS], *who[EVAL_NEEDLE_FACTS];
    char value[EVAL_NEEDLE_FACTS][32];
};

static void words_for(struct dice *d, int wording, struct material *m) {
    const char *value[EVAL_NEEDLE_FACTS] = {0};
    pick(d, people, COUNT(people), EVAL_NEEDLE_FACTS, m->who);
    pick(d, things, COUNT(things), EVAL_NEEDLE_FACTS, m->thing);
    if (wording == NUMBER || wording == TRAIN)
        pick(d, towns, COUNT(towns), EVAL_NEEDLE_FACTS, m->key);
    else if (wording == PASSWORD) pick(d, rooms, COUNT(rooms), EVAL_NEEDLE_FACTS, m->key);
    else memcpy(m->key, m->who, sizeof m->key);
    if (wording == PASSWORD) pick(d, words, COUNT(words), EVAL_NEEDLE_FACTS, value);
    else if (wording == PLACE) pick(d, places, COUNT(places), EVAL_NEEDLE_FACTS, value);
    else if (wording == FRUIT) pick(d, fruits, COUNT(fruits), EVAL_NEEDLE_FACTS, value);
    for (int i = 0; i < EVAL_NEEDLE_FACTS; i++) {
        /* Ranges of i keep the values apart. */
        if (wording == NUMBER)
            snprintf(m->value[i], sizeof m->value[i], "%u",
                     10000 + 22500 * (uint32_t)i + roll(d, 22500));
        else if (wording == TRAIN)
            snprintf(m->value[i], sizeof m->value[i], "%u:%02u", 6 + 4 * (uint32_t)i + roll(d, 4),
                     10 + roll(d, 49));
        else snprintf(m->value[i], sizeof m->value[i], "%s", value[i]);
    }
}

static void say_fact(char *out, size_t n, int wording, const struct material *m, int i) {
    const char *key = m->key[i], *value = m->value[i];
    switch (wording) {
    case NUMBER:
        snprintf(out, n, "The lucky number of %s is %s.", key, value);
        break;
    case PASSWORD:
        snprintf(out, n, "The password for the %s is %s.", key, value);
        break;
    case PLACE:
        snprintf(out, n, "The %s of %s is in the %s.", m->thing[i], key, value);
        break;
    case FRUIT:
        snprintf(out, n, "The favourite fruit of %s is the %s.", key, value);
        break;
    default:
        snprintf(out, n, "The last train to %s leaves at %s.", key, value);
    }
}

static void ask(char *out, size_t n, int wording, const struct material *m, int i) {
    const char *key = m->key[i];
    switch (wording) {
    case NUMBER:
        snprintf(out, n, "What is the lucky number of %s?", key);
        break;
    case PASSWORD:
        snprintf(out, n, "What is the password for the %s?", key);
        break;
    case PLACE:
        snprintf(out, n, "Where is the %s of %s?", m->thing[i], key);
        break;
    case FRUIT:
        snprintf(out, n, "What is the favourite fruit of %s?", key);
        break;
    default:
        snprintf(out, n, "When does the last train to %s leave?", key);
    }
}

/* The fact that leads to the i-th key, and the question that needs both. */
static void say_way(char *out, size_t n, int wording, const struct material *m, int i) {
    const char *who = m->who[i], *key = m->key[i];
    if (wording == NUMBER) snprintf(out, n, "%s was born in %s.", who, key);
    else if (wording == PASSWORD) snprintf(out, n, "%s works in the %s.", who, key);
    else snprintf(out, n, "%s wants to take the last train to %s.", who, key);
}
static void ask_way(char *out, size_t n, int wording, const struct material *m, int i) {
    const char *who = m->who[i];
    if (wording == NUMBER)
        snprintf(out, n, "What is the lucky number of the town where %s was born?", who);
    else if (wording == PASSWORD)
        snprintf(out, n, "What is the password for the room where %s works?", who);
    else snprintf(out, n, "When does the train leave that %s wants to take?", who);
}

void eval_needle_make(struct eval_needle *out, enum eval_needle_kind kind, uint64_t seed,
                      uint32_t index, double depth) {
    static const int ways[] = {NUMBER, PASSWORD, TRAIN};
    struct dice d = {seed, index, 0};
    struct material m;
    *out = (struct eval_needle){.kind = kind};
    uint32_t turn = roll(&d, N_WORDINGS * 3);
    out->wording = kind == EVAL_NEEDLE_HOP ? ways[turn % 3] : (int)(turn % N_WORDINGS);
    words_for(&d, out->wording, &m);
    bool hop = kind == EVAL_NEEDLE_HOP, many = kind == EVAL_NEEDLE_MANY;
    out->n_facts = hop || many ? EVAL_NEEDLE_FACTS : 1;
    for (int i = 0; i < out->n_facts; i++) {
        char *text = out->fact[i].text;
        /* Of a hop: fact, way to it, the same of another key. */
        if (hop && i % 2) say_way(text, sizeof out->fact[i].text, out->wording, &m, i / 2);
        else say_fact(text, sizeof out->fact[i].text, out->wording, &m, hop ? i / 2 : i);
        out->fact[i].depth =
            i ? (double)rng_uniform(seed, index, RNG_EVAL, 1000 + (uint32_t)i) : depth;
    }
    if (hop) ask_way(out->question, sizeof out->question, out->wording, &m, 0);
    else ask(out->question, sizeof out->question, out->wording, &m, 0);
    snprintf(out->value, sizeof out->value, "%s", m.value[0]);
}

bool eval_says(const char *answer, const char *value) {
    size_t n = strlen(value);
    for (const char *p = answer; n > 0 && *p; p++) {
        size_t same = 0;
        while (same < n && tolower((unsigned char)p[same]) == tolower((unsigned char)value[same]))
            same++;
        if (same < n) continue;
        bool before = p > answer && isalnum((unsigned char)p[-1]);
        if (!before && !isalnum((unsigned char)p[n])) return true;
    }
    return false;
}
