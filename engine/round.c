/* A round's two ends: before any pass, who proposes how many draft tokens; after the decision, what
 * that taught, and the rollback of both caches to exactly the committed tokens. */
#include <string.h>

#include "base/err.h"
#include "engine/engine_private.h"

/* ---- A request's beginning ---- */

void engine__round_begin(struct engine *g, struct engine_request *r, int n_draft_hit,
                         enum engine_no_draft why) {
    r->n_draft_kv = n_draft_hit;
    r->no_draft = why;
    r->probe = (struct draft_probe){0};
    draft_rates_init(r->rate, g->prior);
    if (r->lookup_memory)
        draft_lookup_init(&r->lookup, r->lookup_memory, r->n_prompt + r->max_tokens);
}

void engine__drop_draft(struct engine *g, struct engine_request *r, enum engine_no_draft why) {
    kvpool_seq_drop_draft(g->pool, r->seq);
    r->n_draft_kv = -1;
    r->no_draft = why;
    g->live.n_draft_starved += why == ENGINE_DRAFT_MEMORY;
}

/* ---- Bids ---- */

/* Most draft tokens that this round may hold: what the request still may emit, in its epoch, less
 * the token that the target adds itself. The same bound keeps every row inside the reservation and
 * the context. */
static int most_tokens(const struct engine *g, const struct engine_request *r) {
    int most = g->sizes.o.max_draft_tokens, left = r->max_tokens - r->n_out - 1;
    if (engine__sparse_left(r) - 1 < left) left = engine__sparse_left(r) - 1;
    if (engine__exact_left(g, r) - 1 < left) left = engine__exact_left(g, r) - 1;
    return left < most ? left : most;
}

/* The draft processes all but the last token that it proposes. */
static int most_by_model(const struct engine *g, const struct engine_request *r, int most) {
    if (r->n_draft_kv < 0) return 0;
    int room = g->sizes.draft_context - engine__n_tokens(r) + 1;
    return room < most ? (room > 0 ? room : 0) : most;
}

int engine__draft_setting(const struct engine *g, const struct verify_params *p) {
    return p->draft_tokens == VERIFY_DRAFT_DEFAULT ? g->sizes.o.draft_tokens : p->draft_tokens;
}

static int ask_lookup(struct engine_request *r, int most, int *n_match) {
    *n_match = 0;
    if (!r->lookup_memory) return 0;
    if (r->seen) return engine__exact_lookup(r, most, n_match);
    draft_lookup_extend(&r->lookup, r->ids, engine__n_tokens(r));
    return draft_lookup_propose(&r->lookup, r->ids, engine__n_tokens(r), most, r->looked_up,
                                n_match);
}

/* What `r` may propose in this round; false where nothing. */
static bool make_bid(struct engine *g, struct engine_request *r) {
    int most = most_tokens(g, r), wanted = engine__draft_setting(g, &r->params), n_match = 0;
    r->n_draft = 0;
    r->first_q = -1;
    r->draft_nan = r->has_bid = false;
    if (wanted != VERIFY_DRAFT_AUTO && wanted < most) most = wanted;
    if (r->n_draft_kv >= g->sizes.draft_context) engine__drop_draft(g, r, ENGINE_DRAFT_CONTEXT);
    if (most <= 0) return false;
    int by_lookup = ask_lookup(r, most, &n_match), by_model = most_by_model(g, r, most);
    r->bid =
        (struct draft_bid){.max_model = by_model,
                           .max_lookup = by_lookup,
                           .n_match = n_match,
                           .kv_tokens = engine__n_tokens(r),
                           .target_kv = engine__sparse_kv(g, r, engine__n_tokens(r)),
                           .n_lag = r->n_draft_kv < 0 ? 1 : engine__n_tokens(r) - r->n_draft_kv,
                           .n_left = r->max_tokens - r->n_out,
                           .rate = r->rate,
                           .probe = &r->probe,
                           .forced = wanted == VERIFY_DRAFT_AUTO ? -1 : most};
    r->has_bid = by_lookup > 0 || by_model > 0;
    return r->has_bid;
}

/* Bids of the turn, of which a dense pass makes none; rows and positions of those that make none
 * are summed. */
static int make_bids(struct engine *g, int *n_other, double *other_kv) {
    int n = 0;
    *n_other = 0;
    *other_kv = 0;
    for (int i = 0; i < g->n_turn; i++) {
        struct engine_request *r = g->turn[i];
        if (!r->is_dense && make_bid(g, r)) {
            g->bid[n] = r->bid;
            g->bidder[n++] = r;
        } else {
            *n_other += 1 + r->n_draft;
            *other_kv += engine__sparse_kv(g, r, engine__n_tokens(r));
        }
    }
    return n;
}

/* ---- The model's turn ---- */

static void observe(void *arg, const struct proposer_pass *pass) {
    struct engine *g = arg;
    g->draft_ns += pass->ns;
    g->draft_pass_rows += pass->n_rows;
    engine__observe_draft(g, pass);
}

/* Rows that all drafts together may catch up in this step: as many as take the time that prompt
 * rows may take, a draft's row being cheaper by the layers that it lacks. */
static int catch_up_budget(const struct engine *g) {
    const struct engine_sizes *z = &g->sizes;
    long long n = engine__prompt_budget(&g->costs, g->n_turn, z->o.max_rows, z->o.prefill_share);
    n = n * model_get_config(g->model)->n_layers / z->draft_layers;
    return n < z->proposer.max_rows ? (int)n : z->proposer.max_rows;
}

/* In a provisional round a draft token is accepted when it is the sparse target's own draw, as it
 * will be when it is the dense one's: the law that matters is theirs, and the likeliest token is
 * the best guess of a draw. */
static struct kern_sample sample_of_draft(const struct engine *g, const struct engine_request *r) {
    struct kern_sample s = engine__sample_of(g, r);
    if (r->seen && !s.gumbel) s.temperature = 0;
    return s;
}

static bool wants_probs(const struct engine_request *r) {
    return r->params.temperature > 0 && r->params.coupling != VERIFY_GUMBEL && !r->seen;
}

/* Turn the bids that the model won into its turns. Who is far behind gets what is left of the
 * budget to catch up, first come first served, and proposes nothing yet. Draft tokens stand as -1
 * behind the committed ones: they will be known to the backend alone. */
static int fill_turns(struct engine *g, int n_bids) {
    int n = 0, rows = 0, budget = catch_up_budget(g);
    for (int far = 0; far < 2; far++) {
        for (int i = 0; i < n_bids; i++) {
            struct engine_request *r = g->bidder[i];
            const struct draft_bid *b = &g->bid[i];
            if (b->source != DRAFT_BY_MODEL || b->n_draft == 0) continue;
            int lag = b->n_lag, most = lag;
            if ((lag > ENGINE_FAR_BEHIND) != far) continue;
            int room = far ? budget - rows : g->sizes.proposer.max_rows - rows;
            if (most > room) most = room;
            if (most <= 0) continue;
            rows += most;
            /* A draft page joins its cached block now, before the window gives it back. */
            if (g->sizes.o.draft_window > 0 && r->use_cache)
                kvpool_seq_register(g->pool, r->seq, r->ids, r->n_prompt, KVPOOL_PROMPT);
            g->drafter[n] = r;
            g->draft_turn[n++] = (struct proposer_turn){
                .seq = r->seq,
                .ids = r->ids,
                .n_tokens = engine__n_tokens(r),
                .n_rows = most,
                .n_draft = most == lag ? b->n_draft : 0,
                .sample = sample_of_draft(g, r),
                .min_position = r->n_prompt + r->params.min_tokens,
                .wants_probs = wants_probs(r),
                .n_kv = r->n_draft_kv,
            };
            if (most < lag) continue;
            r->n_draft = b->n_draft;
            if (g->draft_turn[n - 1].wants_probs) r->first_q = proposer_first(g->proposer, n - 1);
            for (int j = 0; j < r->n_draft; j++) r->ids[engine__n_tokens(r) + j] = -1;
        }
    }
    return n;
}

/* Draft tokens that hold a -1 are no proposal: the draft's output held NaN there. */
static bool has_nan(const struct engine *g, int turn) {
    const int32_t *token = (const int32_t *)g->batch.drawn.host + proposer_first(g->proposer, turn);
    for (int i = 0; i < g->draft_turn[turn].n_proposed; i++)
        if (token[i] < 0) return true;
    return false;
}

/* A draft's time belongs to requests by the rows that they had in it. */
static void share_time(struct engine *g, int n_turns) {
    for (int i = 0; i < n_turns && g->draft_pass_rows > 0; i++) {
        const struct proposer_turn *t = &g->draft_turn[i];
        int rows = t->n_rows + (t->n_proposed > 0 ? t->n_proposed - 1 : 0);
        g->drafter[i]->speculation.draft_ns += g->draft_ns * rows / g->draft_pass_rows;
    }
}

/* Draft tokens that all rounds of this step may have. Every running sequence may want a row of
 * logits in it, also one whose prompt ends here; and where prompts are waiting, rounds leave them
 * their least chunk, or long rounds would keep a small step from ever reaching them. */
static int draft_room(const struct engine *g) {
    const struct model_caps *caps = &g->batch.pass.caps;
    int by_logits = caps->max_logits - g->n_running, by_rows = caps->max_rows - g->n_turn;
    for (int i = 0; i < g->n_running; i++) {
        const struct engine_request *r = g->running[i];
        if (engine__decodes(r) || atomic_load_explicit(&r->paused, memory_order_acquire)) continue;
        by_rows -= ENGINE_MIN_CHUNK;
        break;
    }
    int room = (by_logits < by_rows ? by_logits : by_rows) - g->n_dense_rows;
    return room > 0 ? room : 0;
}

void engine__choose(struct engine *g) {
    int n_other;
    double other_kv;
    g->n_draft_turns = 0;
    int n = make_bids(g, &n_other, &other_kv);
    if (n == 0) return;
    draft_choose(&g->passes, g->bid, n, n_other, other_kv, draft_room(g));
    for (int i = 0; i < n; i++) {
        struct engine_request *r = g->bidder[i];
        r->bid = g->bid[i];
        if (r->bid.source != DRAFT_BY_LOOKUP) continue;
        r->n_draft = r->bid.n_draft;
        memcpy(r->ids + engine__n_tokens(r), r->looked_up, (size_t)r->n_draft * sizeof *r->ids);
    }
    if (g->proposer) g->n_draft_turns = fill_turns(g, n);
}

int engine__draft_prepare(struct engine *g, struct err *e) {
    int n_eog = g->n_eog < ENGINE_MAX_BANNED ? g->n_eog : ENGINE_MAX_BANNED;
    if (g->n_draft_turns == 0) return 0;
    for (int i = 0; i < g->n_draft_turns; i++)
        g->draft_turn[i].first_target = g->drafter[i]->first_draft;
    int rc =
        proposer_prepare(g->proposer, g->pool, g->eog, n_eog, g->draft_turn, g->n_draft_turns, e);
    return rc ? err_prefix(e, rc, "draft") : 0;
}

int engine__draft_run(struct engine *g, int *mark, struct err *e) {
    if (g->n_draft_turns == 0) return 0;
    struct kern_history history = engine__history(g);
    int rc =
        proposer_run(g->proposer, &history, g->batch.drawn.dev, g->batch.pass.token.dev, mark, e);
    return rc ? err_prefix(e, rc, "draft") : 0;
}

int engine__draft_done(struct engine *g) {
    g->draft_ns = g->draft_pass_rows = 0;
    if (g->n_draft_turns == 0) return 0;
    int rc = proposer_done(g->proposer, observe, g);
    for (int i = 0; i < g->n_draft_turns; i++) {
        struct engine_request *r = g->drafter[i];
        ASSERT(g->draft_turn[i].n_proposed == r->n_draft);
        r->n_draft_kv = g->draft_turn[i].n_kv;
        r->draft_nan = has_nan(g, i);
    }
    share_time(g, g->n_draft_turns);
    return rc;
}

/* ---- After the decision ---- */

static void count(struct engine_speculation *s, const struct engine_request *r, int n_accepted) {
    if (r->n_draft == 0) {
        s->n_plain_rounds++;
        return;
    }
    s->n_rounds++;
    s->n_drafted += (uint64_t)r->n_draft;
    s->n_accepted += (uint64_t)n_accepted;
    if (r->bid.source == DRAFT_BY_LOOKUP) {
        s->n_lookup_drafted += (uint64_t)r->n_draft;
        s->n_lookup_accepted += (uint64_t)n_accepted;
    }
    for (int i = 0; i < r->n_draft; i++) s->n_drafted_at[i]++;
    for (int i = 0; i < n_accepted; i++) s->n_accepted_at[i]++;
}

/* Pages that a cache of class c loses by going back to n tokens. */
static int roll_back(struct engine *g, const struct engine_request *r, enum kvpool_class c, int n) {
    int before, after;
    kvpool_seq_pages(g->pool, r->seq, c, &before);
    kvpool_seq_truncate(g->pool, r->seq, c, n);
    kvpool_seq_pages(g->pool, r->seq, c, &after);
    return before - after;
}

/* What an end of the answer cut off was drafted and counts as that, but says nothing of how well:
 * behind an end token the draft guesses what nobody would have gone on to say. */
void engine__round_end(struct engine *g, struct engine_request *r, int n_accepted,
                       int n_committed) {
    int n_pages = 0, n_emitted = n_committed < n_accepted ? n_committed : n_accepted;
    int n_judged = n_committed <= n_accepted ? n_committed : r->n_draft;
    if (r->has_bid)
        draft_learn(&r->bid, g->prior, n_judged, n_emitted, r->looked_up, r->bid.max_lookup,
                    r->ids + engine__n_tokens(r) - n_committed, n_committed);
    /* The prompt's own last row is no round, a dense pass none with a draft. */
    if (!r->is_dense && r->n_out + r->n_ahead > n_committed) {
        count(&r->speculation, r, n_emitted);
        count(&g->live.speculation, r, n_emitted);
    }
    for (int i = 0; i < g->sizes.n_groups; i++)
        n_pages += roll_back(g, r, g->sizes.group_class[i], r->n_kv);
    if (r->n_draft_kv > r->n_kv) {
        roll_back(g, r, KVPOOL_DRAFT, r->n_kv);
        r->n_draft_kv = r->n_kv;
    }
    r->speculation.n_page_rollbacks += n_pages > 0;
    g->live.speculation.n_page_rollbacks += n_pages > 0;
    r->n_draft = 0;
    r->has_bid = false;
}
