/* How many tokens to propose.
 *
 * A round emits, for each sequence, one token and what is accepted: place i earns the chance that
 * all places up to i are accepted. It takes the target's pass over all rows and, where the model
 * drafts, its passes: the first with what each sequence has to catch up on, then one a place, each
 * with as many rows as sequences still draft. Lookup costs nothing but rows. The choice is the one
 * with most tokens by time.
 *
 * One sequence: every source and length is priced. Many: for a given number of draft passes the
 * earnings, which fall with the place, are taken in their order, less the draft's row; the price is
 * looked at after each and the best beginning wins, so that a step in V(rows) does not hide what
 * lies behind it. So for each number of passes, whose opening all share; the best one wins. Then
 * each sequence is tried at a few other settings, and rows are exchanged between few.
 *
 * Catching up is paid once and serves the rounds after it, so it is charged by parts, over those of
 * them that lookup will not fill: as many as of late, by the tokens that may still come, at most
 * 256. (Over all of them it looked so cheap that a draft caught up on a prompt for one round of two
 * tokens.) Two rows a round are its ordinary share. A long way is taken as a prompt is, at a tenth
 * of what a generated row costs on a CPU, and priced so where that is known.
 *
 * A sequence whose model was found not to pay is off. It is tried again with one token when
 * `wait` rounds have passed, twice as many after each failure, and a hundredth of the time since
 * then covers what trying costs, catching up included. After a success it is tried again at once,
 * with old evidence counting little, so that four good rounds bring it back. Where catching up
 * costs more than that hundredth a token, that moment never comes: there it is tried once in a
 * request's life, after 512 rounds, and for the same reason one bad stretch does not turn it off: a
 * running mean of what it gains must say so, unless the loss is great.
 *
 * Settings nearly as good as the best are taken when nobody did so for 64 rounds, more where their
 * times are well known: a time that was learned in a bad moment would otherwise keep everyone from
 * learning it anew.
 *
 * Lookup's rates begin with what is usual in texts that repeat themselves. A long prompt of prose
 * has many matches and none that goes on, and a pass of nine rows behind it takes three times one
 * row's: until lookup was right three times over in this request, it proposes no more than two.
 */
#include "draft/depth.h"

#include <string.h>

#include "base/err.h"
#include "draft/depth_private.h"

enum {
    FIRST_WAIT = 4,
    MOST_WAIT = 64,
    LONG_IDLE = 512,
    UNPROVEN = 2, /* most that lookup proposes before it was right PROOF times at a stretch */
    PROOF = 3,
    FEW_SEATS = 8,      /* so many get every cap of the draft's passes and exchanges */
    MOST_HORIZON = 256, /* tokens */
    MOST_ROWS = DRAFT_MAX_BIDS * KERN_MAX_DRAFT,
};
#define PROBE_SHARE 0.01 /* of the time */
#define FIRST_CREDIT 0.3 /* of a round, for trying again soon after giving up */
#define PROBE_ROUNDS 4.0 /* that old evidence counts when it is tried again */
#define NEARLY 0.92      /* of the best setting: worth learning about */
#define STAY 1.02        /* drafts count for where the model is in use */
#define PATIENCE 60.0    /* rounds */
#define STILL_WORTH 0.99
#define HOPELESS 0.8
#define LEAST_EARNED 0.01 /* of a token: places that earn less are not looked at */
#define GUESS_DRAFT 0.15  /* a draft's step by the target's, while unknown */

/* A bid while the choice is made. */
struct seat {
    double earned[2][KERN_MAX_DRAFT + 1]; /* [source][g]: tokens expected of g */
    int offered[2], most[2];              /* [source]; those that are worth a look */
    double kv, catch_up;                  /* rows of its first draft pass */
    double lag_ns;                        /* of a long way to catch up, a round's part */
    int source, g;
};

/* A whole round, priced as seats move. */
struct round {
    struct seat *seat;
    int n_seats, n_all;   /* n_all: those of other rows too */
    int n_rows, max_rows; /* draft rows */
    double tokens, fixed_ns, draft_ns, lag_ns;
    double draft_kv, per_draft_kv; /* context at which draft_full was fitted; 1 / it, or 0 */
    struct draft__curve target, draft_empty, draft_full;
    double empty_ns[DRAFT_MAX_BIDS + 2], full_ns[DRAFT_MAX_BIDS + 2]; /* the draft's by rows */
    int n_at[KERN_MAX_DRAFT]; /* draft pass -> sequences in it */
    double kv_at[KERN_MAX_DRAFT], pass_ns[KERN_MAX_DRAFT], catch_up;
    int n_base;                      /* rows of the target without draft tokens */
    double target_ns[MOST_ROWS + 1]; /* by draft rows */
};

static double draft_pass_ns(const struct round *r, double rows, double kv) {
    double empty, full;
    int whole = (int)rows;
    if (whole <= r->n_seats) { /* between whole rows both curves are linear */
        double part = rows - whole;
        empty = r->empty_ns[whole] + part * (r->empty_ns[whole + 1] - r->empty_ns[whole]);
        full = r->full_ns[whole] + part * (r->full_ns[whole + 1] - r->full_ns[whole]);
    } else {
        empty = draft__curve_at(&r->draft_empty, rows);
        full = draft__curve_at(&r->draft_full, rows);
    }
    return empty + (full - empty) * kv * r->per_draft_kv;
}

static void price_pass(struct round *r, int pass) {
    double rows = pass == 0 ? r->catch_up : r->n_at[pass];
    double ns = r->n_at[pass] > 0 ? draft_pass_ns(r, rows, r->kv_at[pass]) : 0;
    r->draft_ns += ns - r->pass_ns[pass];
    r->pass_ns[pass] = ns;
}

/* Let a seat draft g tokens by `source`. */
static void move(struct round *r, struct seat *s, int source, int g) {
    int was = s->source == DRAFT_BY_MODEL ? s->g : 0, is = source == DRAFT_BY_MODEL ? g : 0;
    int step = is > was ? 1 : -1;
    for (int pass = was < is ? was : is; pass < (was < is ? is : was); pass++) {
        r->n_at[pass] += step;
        r->kv_at[pass] += step * s->kv;
        if (pass == 0) {
            r->catch_up += step * s->catch_up;
            r->lag_ns += step * s->lag_ns;
        }
        price_pass(r, pass);
    }
    r->n_rows += g - s->g;
    r->tokens += s->earned[source][g] - s->earned[s->source][s->g];
    s->source = source;
    s->g = g;
}

static double round_ns(const struct round *r) {
    return r->fixed_ns + r->target_ns[r->n_rows] + r->draft_ns + r->lag_ns;
}

static double score(const struct round *r) {
    return r->tokens / round_ns(r);
}

/* ---- Setting up ---- */

/* The rows beyond those that every round has are spread over `rounds`. */
static void set_catch_up(struct seat *s, const struct draft_bid *b, double rounds,
                         double lag_row_ns) {
    int lag = b->n_lag < 1 ? 1 : b->n_lag, ordinary = lag < 2 ? lag : 2;
    bool is_long = lag > DRAFT_LONG_WAY && lag_row_ns > 0;
    s->catch_up = ordinary + (is_long ? 0 : (lag - ordinary) / rounds);
    s->lag_ns = is_long ? (lag - ordinary) * lag_row_ns / rounds : 0;
}

static void fill_earned(struct seat *s, int source, const struct draft_rate *rate, int most,
                        int max_rows) {
    double chance[KERN_MAX_DRAFT];
    most = most < 0 ? 0 : most > KERN_MAX_DRAFT ? KERN_MAX_DRAFT : most;
    if (most > max_rows) most = max_rows;
    s->offered[source] = s->most[source] = most;
    s->earned[source][0] = 0;
    if (most == 0) return;
    draft__rate_chances(rate, most, chance);
    for (int i = 0; i < most; i++) s->earned[source][i + 1] = s->earned[source][i] + chance[i];
    while (s->most[source] > 1 && chance[s->most[source] - 1] < LEAST_EARNED) s->most[source]--;
}

static void sit_down(struct seat *s, const struct draft_bid *b, int max_rows, double lag_row_ns) {
    int left = b->n_left <= 0 || b->n_left > MOST_HORIZON ? MOST_HORIZON : b->n_left;
    s->source = DRAFT_BY_MODEL;
    s->g = 0;
    s->kv = b->kv_tokens;
    set_catch_up(s, b, draft__rate_rounds(&b->rate[DRAFT_BY_MODEL], left), lag_row_ns);
    fill_earned(s, DRAFT_BY_MODEL, &b->rate[DRAFT_BY_MODEL], b->max_model, max_rows);
    bool trusted = b->forced >= 0 || b->rate[DRAFT_BY_LOOKUP].proven;
    fill_earned(s, DRAFT_BY_LOOKUP, &b->rate[draft_rate_idx(DRAFT_BY_LOOKUP, b->n_match)],
                trusted || b->max_lookup < UNPROVEN ? b->max_lookup : UNPROVEN, max_rows);
}

/* Prices of the target by draft rows, of the draft at both ends of its context. */
static void fit_prices(struct round *r, const struct draft_costs *c, double kv) {
    draft__curve_fit(&c->target, kv, &r->target);
    if (r->target.ns[0] <= 0) draft__curve_guess(1e6, &r->target);
    draft__curve_fit(&c->draft, 0, &r->draft_empty);
    draft__curve_fit(&c->draft, r->draft_kv, &r->draft_full);
    if (r->draft_full.ns[0] <= 0) {
        draft__curve_guess(GUESS_DRAFT * r->target.ns[0], &r->draft_full);
        r->draft_empty = r->draft_full;
    }
    r->per_draft_kv = r->draft_kv > 0 ? 1 / r->draft_kv : 0;
    r->empty_ns[0] = r->full_ns[0] = 0;
    for (int i = 1; i <= r->n_seats + 1; i++) {
        r->empty_ns[i] = draft__curve_at(&r->draft_empty, i);
        r->full_ns[i] = draft__curve_at(&r->draft_full, i);
    }
    r->fixed_ns = c->fixed_ns > 0 ? c->fixed_ns : 0;
    int most = 0;
    for (int i = 0; i < r->n_seats; i++) {
        const struct seat *s = &r->seat[i];
        most += s->offered[0] > s->offered[1] ? s->offered[0] : s->offered[1];
    }
    if (most > r->max_rows) most = r->max_rows;
    for (int i = 0; i <= most; i++) r->target_ns[i] = draft__curve_at(&r->target, r->n_base + i);
}

/* Fixed settings first: they are obeyed as far as max_rows goes. */
static void seat_forced(struct round *r, const struct draft_bid *bid) {
    for (int i = 0; i < r->n_seats; i++) {
        struct seat *s = &r->seat[i];
        if (bid[i].forced < 0) continue;
        int source = s->most[DRAFT_BY_LOOKUP] > 0 ? DRAFT_BY_LOOKUP : DRAFT_BY_MODEL;
        int g = bid[i].forced < s->offered[source] ? bid[i].forced : s->offered[source];
        if (g > r->max_rows - r->n_rows) g = r->max_rows - r->n_rows;
        if (g > 0) move(r, s, source, g);
    }
}

/* ---- One sequence ---- */

static bool is_off(const struct draft_bid *b) {
    return b->probe && b->probe->wait > 0;
}

static void choose_one(struct round *r, const struct draft_costs *c, const struct draft_bid *b,
                       struct seat *s) {
    double price[2][KERN_MAX_DRAFT + 1], best = 0;
    int best_source = DRAFT_BY_MODEL, best_g = 0, room = r->max_rows - r->n_rows;
    for (int source = 0; source < 2; source++) {
        for (int g = 0; g <= s->most[source] && g <= room; g++) {
            if (g > 0) move(r, s, source, g);
            bool leaves =
                g == 0 && s->most[DRAFT_BY_MODEL] > 0 && !is_off(b) && b->n_lag <= DRAFT_LONG_WAY;
            price[source][g] = score(r) / (leaves ? STAY : 1);
            if (price[source][g] <= best) continue;
            best = price[source][g];
            best_source = source;
            best_g = g;
        }
        move(r, s, source, 0);
    }
    /* A setting nearly as good whose time is stale; the longest draft first. */
    int rows = r->n_base + r->n_rows;
    double nearly = NEARLY * best;
    bool stale = false;
    for (int source = 0; source < 2 && r->n_seats == 1; source++) {
        if (source == DRAFT_BY_MODEL && is_off(b)) continue;
        for (int g = s->most[source] < room ? s->most[source] : room; g >= 0 && !stale; g--) {
            if (price[source][g] < nearly || !draft__cost_stale(&c->target, rows + g)) continue;
            stale = true;
            best_source = source;
            best_g = g;
        }
    }
    move(r, s, best_source, best_g);
}

/* ---- Many ---- */

/* What a row more costs in tokens, at the rate of a round without drafts: in the target's pass on
 * average, and in a draft pass that runs anyway. */
struct row_price {
    double target, draft;
    double ns; /* and what a nanosecond costs */
};

static struct row_price price_rows(const struct round *r) {
    struct row_price p = {0, 0, score(r)};
    int n = 0, span = r->max_rows - r->n_rows;
    double rate = p.ns;
    if (span > r->n_seats) span = r->n_seats;
    if (span > 0)
        p.target = rate * (r->target_ns[r->n_rows + span] - r->target_ns[r->n_rows]) / span;
    for (int i = 0; i < r->n_seats; i++) n += r->seat[i].most[DRAFT_BY_MODEL] > 0;
    if (n == 0) return p;
    double all = draft_pass_ns(r, n + 1, r->draft_kv), one = draft_pass_ns(r, 1, r->draft_kv / n);
    p.draft = rate * (all - one) / n;
    return p;
}

/* What place g of a seat's draft earns less what it costs the draft. */
static double key_of(const struct seat *s, int source, int g, const struct row_price *p) {
    double key = s->earned[source][g + 1] - s->earned[source][g];
    if (source == DRAFT_BY_LOOKUP) return key;
    return key - (g == 0 ? s->catch_up * p->draft + s->lag_ns * p->ns : p->draft);
}

struct queue {
    int n;
    int seat[DRAFT_MAX_BIDS];
    double key[DRAFT_MAX_BIDS]; /* [i] of seat[i]; a heap, the largest first, then the lower seat */
};

static bool comes_first(const struct queue *q, int a, int b) {
    return q->key[a] > q->key[b] || (q->key[a] == q->key[b] && q->seat[a] < q->seat[b]);
}

static void swap(struct queue *q, int a, int b) {
    int seat = q->seat[a];
    double key = q->key[a];
    q->seat[a] = q->seat[b];
    q->key[a] = q->key[b];
    q->seat[b] = seat;
    q->key[b] = key;
}

static void sift_down(struct queue *q, int i) {
    for (;;) {
        int first = i, left = 2 * i + 1;
        if (left < q->n && comes_first(q, left, first)) first = left;
        if (left + 1 < q->n && comes_first(q, left + 1, first)) first = left + 1;
        if (first == i) return;
        swap(q, i, first);
        i = first;
    }
}

/* Take earnings, the largest first, while they cover the draft's rows, with at most `cap` passes of
 * the draft; go back to where the price was best. Seats of the queue stand at g = 0; source[] says
 * who proposes. Returns the score. */
static double walk(struct round *r, const struct draft_bid *bid, const uint8_t *source, int cap,
                   const struct row_price *price) {
    struct queue q;
    uint8_t taken[MOST_ROWS];
    int n_steps = 0, n_best = 0;
    double best = score(r);
    q.n = 0;
    for (int i = 0; i < r->n_seats; i++) {
        struct seat *s = &r->seat[i];
        if (bid[i].forced >= 0 || s->most[source[i]] == 0) continue;
        if (source[i] == DRAFT_BY_MODEL && cap == 0) continue;
        move(r, s, source[i], 0);
        q.key[q.n] = key_of(s, source[i], 0, price);
        q.seat[q.n++] = i;
    }
    for (int i = q.n / 2 - 1; i >= 0; i--) sift_down(&q, i);
    while (q.n > 0 && r->n_rows < r->max_rows && q.key[0] > 0) {
        struct seat *s = &r->seat[q.seat[0]];
        taken[n_steps++] = (uint8_t)q.seat[0];
        move(r, s, s->source, s->g + 1);
        double now = score(r);
        if (now > best) {
            best = now;
            n_best = n_steps;
        }
        if (s->g < s->most[s->source] && (s->source == DRAFT_BY_LOOKUP || s->g < cap)) {
            q.key[0] = key_of(s, s->source, s->g, price);
        } else {
            q.n--;
            swap(&q, 0, q.n);
        }
        sift_down(&q, 0);
    }
    while (n_steps > n_best) {
        struct seat *s = &r->seat[taken[--n_steps]];
        move(r, s, s->source, s->g - 1);
    }
    return best;
}

/* The length at which a seat alone would do best by a source, and what it is worth then. */
static int solo_length(const struct seat *s, int source, int cap, const struct row_price *p,
                       double *worth) {
    int most = s->most[source], best_g = 0;
    double sum = 0, best = 0;
    if (source == DRAFT_BY_MODEL && most > cap) most = cap;
    for (int g = 0; g < most; g++) {
        sum += key_of(s, source, g, p) - p->target;
        if (sum <= best) continue;
        best = sum;
        best_g = g + 1;
    }
    *worth = best;
    return best_g;
}

/* The better source for each seat when the draft runs at most `cap` passes. */
static void pick_sources(const struct round *r, int cap, const struct row_price *p,
                         uint8_t *source) {
    for (int i = 0; i < r->n_seats; i++) {
        const struct seat *s = &r->seat[i];
        double by_model = 0, by_lookup = 0;
        source[i] = DRAFT_BY_MODEL;
        if (s->most[DRAFT_BY_LOOKUP] == 0) continue;
        solo_length(s, DRAFT_BY_LOOKUP, cap, p, &by_lookup);
        if (s->most[DRAFT_BY_MODEL] > 0 && cap > 0)
            solo_length(s, DRAFT_BY_MODEL, cap, p, &by_model);
        if (by_lookup >= by_model) source[i] = DRAFT_BY_LOOKUP;
    }
}

static void stand_up(struct round *r, const struct draft_bid *bid) {
    for (int i = 0; i < r->n_seats; i++)
        if (bid[i].forced < 0 && r->seat[i].g > 0) move(r, &r->seat[i], r->seat[i].source, 0);
}

/* The setting of one seat that is best while all others stay. Returns whether it moved. */
static bool improve(struct round *r, struct seat *s, const struct row_price *p) {
    int source = s->source, g = s->g, room = r->max_rows - r->n_rows + g;
    int other = source == DRAFT_BY_MODEL ? DRAFT_BY_LOOKUP : DRAFT_BY_MODEL;
    double worth, best = score(r) * (1 + 1e-9);
    int try[5][2] = {
        {source, 0},
        {source, g - 1},
        {source, g + 1},
        {other, g > 0 ? g : 1},
        {other, s->most[other] ? solo_length(s, other, KERN_MAX_DRAFT, p, &worth) : 0}};
    int best_source = source, best_g = g;
    for (int i = 0; i < 5; i++) {
        if (try[i][1] < 0 || try[i][1] > s->most[try[i][0]] || try[i][1] > room) continue;
        if (try[i][1] == s->g && (try[i][0] == s->source || s->g == 0)) continue;
        move(r, s, try[i][0], try[i][1]);
        if (score(r) <= best) continue;
        best = score(r);
        best_source = try[i][0];
        best_g = try[i][1];
    }
    move(r, s, best_source, best_g);
    return best_source != source || best_g != g;
}

/* Give a row of one seat to another where that is better. */
static bool exchange(struct round *r, struct seat *from, struct seat *to) {
    if (from->g == 0 || to->g >= to->most[to->source]) return false;
    double before = score(r) * (1 + 1e-9);
    move(r, from, from->source, from->g - 1);
    move(r, to, to->source, to->g + 1);
    if (score(r) > before) return true;
    move(r, to, to->source, to->g - 1);
    move(r, from, from->source, from->g + 1);
    return false;
}

static void polish(struct round *r, const struct draft_bid *bid, const struct row_price *price) {
    for (int sweep = 0, moved = 1; sweep < 2 && moved; sweep++) {
        moved = 0;
        for (int i = 0; i < r->n_seats; i++)
            if (bid[i].forced < 0) moved |= improve(r, &r->seat[i], price);
        for (int i = 0; i < r->n_seats && r->n_seats <= FEW_SEATS; i++)
            for (int k = 0; k < r->n_seats; k++)
                if (k != i && bid[i].forced < 0 && bid[k].forced < 0)
                    moved |= exchange(r, &r->seat[i], &r->seat[k]);
    }
}

static void choose_many(struct round *r, const struct draft_bid *bid) {
    uint8_t source[DRAFT_MAX_BIDS], best_source[DRAFT_MAX_BIDS], best_g[DRAFT_MAX_BIDS];
    int deepest = 0;
    bool lookup = false;
    double best = 0;
    struct row_price price = price_rows(r);
    for (int i = 0; i < r->n_seats; i++) {
        if (r->seat[i].most[DRAFT_BY_MODEL] > deepest) deepest = r->seat[i].most[DRAFT_BY_MODEL];
        lookup |= r->seat[i].most[DRAFT_BY_LOOKUP] > 0;
    }
    /* Each pass that the draft opens costs all who share it: try every number of them, of a large
     * batch none, one and all. */
    for (int cap = lookup || deepest == 0 ? 0 : 1; cap <= deepest; cap++) {
        if (r->n_seats > FEW_SEATS && cap > 1) cap = deepest;
        pick_sources(r, cap, &price, source);
        double now = walk(r, bid, source, cap, &price);
        if (now > best) {
            best = now;
            for (int i = 0; i < r->n_seats; i++) {
                best_source[i] = (uint8_t)r->seat[i].source;
                best_g[i] = (uint8_t)r->seat[i].g;
            }
        }
        stand_up(r, bid);
    }
    for (int i = 0; i < r->n_seats; i++)
        if (bid[i].forced < 0) move(r, &r->seat[i], best_source[i], best_g[i]);
    polish(r, bid, &price);
}

/* ---- On, off, and on again ---- */

/* Tokens by time with the model's draft against without, as if the seat were alone. */
static double gain(struct round *r, struct seat *s) {
    int source = s->source, g = s->g;
    bool drafts = source == DRAFT_BY_MODEL && g > 0;
    double now = score(r);
    move(r, s, DRAFT_BY_MODEL, drafts ? 0 : 1);
    double other = score(r);
    move(r, s, source, g);
    return 1 + r->n_all * (drafts ? now / other - 1 : other / now - 1);
}

/* Where catching up is dear, off is for long; one bad stretch shall not do that. */
static void be_patient(struct round *r, struct draft_bid *b, struct seat *s) {
    struct draft_probe *p = b->probe;
    double row = r->full_ns[2] - r->full_ns[1];
    if (p->wait > 0 || s->source == DRAFT_BY_LOOKUP || row * r->n_all < PROBE_SHARE * round_ns(r) ||
        r->n_rows >= r->max_rows)
        return;
    double now = gain(r, s);
    p->worth = p->worth > 0 ? p->worth + (now - p->worth) / PATIENCE : now;
    if (s->g == 0 && p->worth >= STILL_WORTH && now >= HOPELESS) move(r, s, DRAFT_BY_MODEL, 1);
}

/* A bid that got nothing: let its model try one token if it is time. */
static void probe(struct round *r, struct draft_bid *b, struct seat *s, double lag_row_ns) {
    struct draft_probe *p = b->probe;
    double ns = round_ns(r), rate = score(r);
    if (p->wait == 0)
        *p = (struct draft_probe){
            .wait = FIRST_WAIT, .credit = FIRST_CREDIT * ns / r->n_all, .spent = p->spent};
    if (p->n_idle < INT32_MAX) p->n_idle++;
    p->credit += PROBE_SHARE * ns / r->n_all;
    if (p->n_idle < p->wait || r->n_rows >= r->max_rows) return;
    double catch_up = s->catch_up, lag_ns = s->lag_ns, was = s->earned[DRAFT_BY_MODEL][1];
    set_catch_up(s, b, 1, lag_row_ns); /* all of it is paid now */
    move(r, s, DRAFT_BY_MODEL, 1);
    double cost = round_ns(r) - ns - was / rate;
    bool once = p->n_idle >= LONG_IDLE && !p->spent;
    b->is_probe = p->wait == 1 || once || p->credit >= cost;
    if (!b->is_probe) move(r, s, DRAFT_BY_MODEL, 0);
    s->catch_up = catch_up;
    s->lag_ns = lag_ns;
}

void draft_choose(const struct draft_costs *c, struct draft_bid *bid, int n_bids, int n_other_rows,
                  double other_kv, int max_rows) {
    ASSERT(n_bids >= 0 && n_bids <= DRAFT_MAX_BIDS && n_other_rows >= 0);
    if (n_bids == 0) return;
    struct seat seat[DRAFT_MAX_BIDS];
    struct round r;
    double kv = other_kv;
    int n_auto = 0, only = 0;
    r.seat = seat;
    r.n_seats = n_bids;
    r.n_all = r.n_base = n_bids + n_other_rows;
    r.n_rows = 0;
    r.max_rows = max_rows < 0 ? 0 : max_rows > MOST_ROWS ? MOST_ROWS : max_rows;
    r.tokens = r.n_all;
    r.draft_ns = r.lag_ns = r.draft_kv = r.catch_up = 0;
    memset(r.n_at, 0, sizeof r.n_at);
    memset(r.kv_at, 0, sizeof r.kv_at);
    memset(r.pass_ns, 0, sizeof r.pass_ns);
    for (int i = 0; i < n_bids; i++) {
        sit_down(&seat[i], &bid[i], r.max_rows, c->lag_row_ns);
        kv += bid[i].target_kv > 0 ? bid[i].target_kv : bid[i].kv_tokens;
        if (seat[i].most[DRAFT_BY_MODEL] > 0) r.draft_kv += seat[i].kv;
        if (bid[i].forced >= 0) continue;
        n_auto++;
        only = i;
    }
    fit_prices(&r, c, kv);
    seat_forced(&r, bid);
    if (n_auto == 1) choose_one(&r, c, &bid[only], &seat[only]);
    if (n_auto > 1) choose_many(&r, bid);
    for (int i = 0; i < n_bids; i++) {
        struct draft_bid *b = &bid[i];
        b->is_probe = false;
        if (b->forced < 0 && b->probe && seat[i].most[DRAFT_BY_MODEL] > 0) {
            be_patient(&r, b, &seat[i]);
            if (seat[i].g == 0) probe(&r, b, &seat[i], c->lag_row_ns);
        }
        b->source = seat[i].source == DRAFT_BY_LOOKUP ? DRAFT_BY_LOOKUP : DRAFT_BY_MODEL;
        b->n_draft = seat[i].g;
    }
}

/* ---- Learning ---- */

static void learn_probe(struct draft_probe *p, bool is_probe, bool accepted) {
    if (is_probe) {
        int twice = p->wait > MOST_WAIT / 2 ? MOST_WAIT : 2 * p->wait;
        p->spent |= p->n_idle >= LONG_IDLE;
        p->wait = accepted ? 1 : twice < 2 * FIRST_WAIT ? 2 * FIRST_WAIT : twice;
    } else if (p->wait > 0) {
        p->wait = 0;
        p->worth = 0;
    }
    p->n_idle = 0;
    p->credit = 0;
}

void draft_learn(const struct draft_bid *bid, struct draft_rate *prior, int n_drafted,
                 int n_accepted, const int32_t *looked_up, int n_looked_up, const int32_t *emitted,
                 int n_emitted) {
    if (bid->source == DRAFT_BY_MODEL && n_drafted > 0) {
        if (bid->is_probe && n_accepted > 0)
            draft__rate_fade(&bid->rate[DRAFT_BY_MODEL], PROBE_ROUNDS);
        draft_rate_update(&bid->rate[DRAFT_BY_MODEL], n_drafted, n_accepted);
        if (prior)
            draft__rate_update(&prior[DRAFT_BY_MODEL], DRAFT__KEEP_PRIOR, n_drafted, n_accepted);
        if (bid->probe && bid->forced < 0)
            learn_probe(bid->probe, bid->is_probe, n_accepted == n_drafted);
    } else if (prior && bid->forced < 0 && bid->max_model > 0 && bid->n_draft == 0) {
        draft__rate_fade(&prior[DRAFT_BY_MODEL], prior[DRAFT_BY_MODEL].tried[0] * DRAFT__KEEP_IDLE);
    }
    if (bid->forced < 0 && bid->max_model > 0) {
        bool own = bid->source != DRAFT_BY_LOOKUP || bid->n_draft == 0;
        draft__rate_count(&bid->rate[DRAFT_BY_MODEL], DRAFT__KEEP, own, n_emitted);
        if (prior) draft__rate_count(&prior[DRAFT_BY_MODEL], DRAFT__KEEP_SHARE, own, n_emitted);
    }
    int n = n_looked_up < n_emitted ? n_looked_up : n_emitted, same = 0;
    if (n > KERN_MAX_DRAFT) n = KERN_MAX_DRAFT;
    if (n <= 0) return;
    while (same < n && looked_up[same] == emitted[same]) same++;
    bid->rate[DRAFT_BY_LOOKUP].proven |= same >= PROOF;
    int idx = draft_rate_idx(DRAFT_BY_LOOKUP, bid->n_match);
    draft_rate_update(&bid->rate[idx], same < n ? same + 1 : n, same);
    if (prior) draft__rate_update(&prior[idx], DRAFT__KEEP_PRIOR, same < n ? same + 1 : n, same);
}
