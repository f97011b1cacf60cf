/* `tandem bench --grid` as a table for people and as JSON for programs. */
#include <stdio.h>
#include <string.h>

#include "cmd/bench_grid.h"
#include "cmd/text.h"

const char *bench__grid_cell_name(int cell) {
    static const char *const names[GRID_CELLS] = {"off / dense", "on / dense", "off / sparse",
                                                  "on / sparse"};
    return names[cell];
}

void bench__grid_settings(struct strbuf *b, const struct engine *g,
                          const struct bench_grid_options *o) {
    const struct target_settings *s = &o->sparse;
    const struct model_config *c = engine_model_config(g);
    strbuf_printf(b, "%s, ", target_selector_name(s->selector));
    if (s->keep_blocks > 0) strbuf_printf(b, "%d blocks", s->keep_blocks);
    else if (s->keep > 0) strbuf_printf(b, "a share of %g", s->keep);
    else strbuf_append_str(b, "by the curve");
    int n_shallow = (int)engine_get_plan(g)->pool.shape[KVPOOL_SHALLOW].n_layers;
    strbuf_printf(b, " from layer %d of %d on", n_shallow, c->n_layers);
}

const char bench__grid_dummy[] =
    "Random weights: what is accepted, and with it speculation's gain, says nothing of a model.";

const char *bench__grid_prefill(const struct bench_grid_options *o) {
    return o->prefill == GRID_PREFILL_TURN ? "every turn computes its prompts"
           : o->prefill == GRID_PREFILL_ONCE
               ? "the first cell did, all others found them in the cache"
               : "each cell's first turn did, later ones found them in "
                 "the cache";
}

static double per(uint64_t sum, uint64_t n) {
    return n ? (double)sum / (double)n : 0;
}

static double accepted(const struct grid_cell *c) {
    return per(c->n_accepted, c->n_drafted);
}

static double tokens_per_round(const struct grid_cell *c) {
    uint64_t n = c->n_rounds + c->n_plain_rounds;
    return n ? 1 + per(c->n_accepted, n) : 0;
}

/* ---- The table ---- */

void bench__grid_head(const struct engine *g, const struct bench_grid_options *o) {
    struct strbuf b = {0};
    const struct model_config *d = engine_draft_config(g);
    strbuf_printf(&b, "model %s; speculation on: %s; sparse: ", engine_model_name(g),
                  d ? d->name : "prompt lookup alone");
    bench__grid_settings(&b, g, o);
    strbuf_printf(&b,
                  "\nEach group of prompts is answered by the four cells in turn, %d times after a "
                  "first one; medians. TTFT: of prompts\nthat were computed whole: ",
                  o->n_repeats);
    strbuf_append_str(&b, bench__grid_prefill(o));
    strbuf_append_str(&b, ". \"first\": time per token of the first turn.\n");
    if (engine_is_dummy(g)) strbuf_printf(&b, "%s\n", bench__grid_dummy);
    strbuf_append_str(&b, "ITL: between two commits, of a round's tokens at once. KV read: by the "
                          "target in answers' own passes, as the kernels count, a token.\n");
    fwrite(b.data, 1, b.n, stdout);
    fflush(stdout);
    strbuf_deinit(&b);
}

static void print_cell(const struct grid_cell *c, int cell) {
    char ttft[32] = "cached";
    if (c->ttft_ms > 0) snprintf(ttft, sizeof ttft, "%.1f", c->ttft_ms);
    char blocks[32] = "all", drafts[32] = "-";
    if (c->n_kept < c->n_blocks) snprintf(blocks, sizeof blocks, "%d/%d", c->n_kept, c->n_blocks);
    if (c->n_drafted)
        snprintf(drafts, sizeof drafts, "%.0f%% %.2f", 100 * accepted(c), tokens_per_round(c));
    printf("  %-13s %9s %9.2f %9.2f %9.2f %9.2f %9.1f %12s %12s %12s %9s %11s  %s\n",
           bench__grid_cell_name(cell), ttft, c->first_tpot_ms, c->tpot_ms, c->itl_p50_ms,
           c->itl_p99_ms, c->tokens_per_s, drafts,
           cmd_bytes(per(c->kv.shallow_bytes, c->kv.n_tokens)),
           cmd_bytes(per(c->kv.deep_bytes, c->kv.n_tokens)), blocks, cmd_bytes((double)c->kv_held),
           c->same_text ? "same" : "DIFFERS");
}

static void print_gains(const struct grid_point *p) {
    const struct grid_cell *s = &p->cell[GRID_SPEC], *r = &p->cell[GRID_SPARSE];
    const struct grid_cell *b = &p->cell[GRID_BOTH];
    printf("  gains in time per token: speculation %.2fx (turns %.2f..%.2f), sparse reading %.2fx "
           "(%.2f..%.2f)\n",
           s->gain, s->gain_low, s->gain_high, r->gain, r->gain_low, r->gain_high);
    printf("  product %.2fx, measured together %.2fx (%.2f..%.2f): %.0f %% of the product\n",
           p->product, b->gain, b->gain_low, b->gain_high, 100 * p->share);
}

static void print_proof(const struct grid_point *p) {
    const struct grid_cell *d = &p->cell[GRID_PLAIN], *r = &p->cell[GRID_SPARSE];
    const struct engine_answer_kv *k = &r->kv;
    printf("  sparse path: %s; a pass read %s of K and V where dense ones read %s (%.1f %%); ",
           p->ran_sparse ? "ran for every prompt" : "NOT for every prompt",
           cmd_bytes(per(k->shallow_bytes + k->deep_bytes, k->n_passes)),
           cmd_bytes(per(d->kv.shallow_bytes + d->kv.deep_bytes, d->kv.n_passes)),
           100 * per(k->shallow_bytes + k->deep_bytes, k->n_passes) /
               (per(d->kv.shallow_bytes + d->kv.deep_bytes, d->kv.n_passes) + 1e-9));
    if (p->bytes_agree) printf("kernels' counters are the lists' bytes in every cell\n");
    else {
        printf("kernels over lists:");
        for (int c = 0; c < GRID_CELLS; c++) {
            const struct engine_answer_kv *v = &p->cell[c].kv;
            printf(" %.4f", per(v->shallow_bytes + v->deep_bytes,
                                v->listed_shallow_bytes + v->listed_deep_bytes));
        }
        printf(" (above 1: rounds of more rows than a tile holds)\n");
    }
    if (!p->ran_sparse && r->n_left_out < p->n_prompts)
        printf("  %d of %d prompts lost no block: too short for these settings, and read densely\n",
               p->n_prompts - r->n_left_out, p->n_prompts);
    printf("  text: with speculation %s; sparse answers follow the dense ones for %.0f %% of their "
           "tokens; selecting took %.2f %% of decoding's time\n",
           p->same_text ? "the same as without, dense and sparse" : "NOT THE SAME as without",
           100 * r->like_dense, 100 * r->select_share);
}

void bench__grid_point(const struct grid_point *p, const struct bench_grid_options *o) {
    printf("\nprompts of %d tokens, %d at once: %d prompt%s, answers of up to %d tokens%s\n",
           p->n_prompt_tokens, p->batch, p->n_prompts, p->n_prompts == 1 ? "" : "s", o->n_tokens,
           p->repeats_text ? " (the text is shorter than a prompt and repeats in it)" : "");
    printf("  %-13s %9s %9s %9s %9s %9s %9s %12s %12s %12s %9s %11s  %s\n", "speculation",
           "TTFT ms", "first ms", "TPOT ms", "ITL p50", "ITL p99", "tokens/s", "acc. tok/rd",
           "shallow KV/t", "deep KV/t", "blocks", "KV held", "text");
    for (int c = 0; c < GRID_CELLS; c++) print_cell(&p->cell[c], c);
    print_gains(p);
    if (p->n_kinds > 1) {
        printf("  by question (speculation, sparse, both):");
        for (int i = 0; i < p->n_kinds; i++)
            printf("%s %s %.2f %.2f %.2f", i ? ";" : "", p->kind[i].name,
                   p->kind[i].gain[GRID_SPEC], p->kind[i].gain[GRID_SPARSE],
                   p->kind[i].gain[GRID_BOTH]);
        printf("\n");
    }
    print_proof(p);
    fflush(stdout);
}

/* ---- JSON ---- */

static const char *boolean(bool b) {
    return b ? "true" : "false";
}

static void json_cell(struct strbuf *b, const struct grid_cell *c, int cell) {
    char ttft[32] = "null", worst[32] = "null"; /* nothing but cached prompts */
    if (c->ttft_ms > 0) {
        snprintf(ttft, sizeof ttft, "%.3f", c->ttft_ms);
        snprintf(worst, sizeof worst, "%.3f", c->ttft_worst_ms);
    }
    strbuf_printf(b,
                  "{\"speculation\": \"%s\", \"reading\": \"%s\", \"ttft_ms\": %s, "
                  "\"ttft_worst_ms\": %s, \"first_turn_tpot_ms\": %.4f, \"tpot_ms\": %.4f, "
                  "\"itl_p50_ms\": %.4f, \"itl_p99_ms\": %.4f, \"tokens_per_s\": %.3f, "
                  "\"gain\": %.4f, \"gain_low\": %.4f, \"gain_high\": %.4f, \"tokens\": %d, ",
                  grid_speculates(cell) ? "on" : "off",
                  grid_reads_sparsely(cell) ? "sparse" : "dense", ttft, worst, c->first_tpot_ms,
                  c->tpot_ms, c->itl_p50_ms, c->itl_p99_ms, c->tokens_per_s, c->gain, c->gain_low,
                  c->gain_high, c->n_tokens);
    strbuf_printf(b,
                  "\"drafted\": %llu, \"accepted\": %llu, \"acceptance\": %.4f, "
                  "\"tokens_per_round\": %.4f, \"rounds\": %llu, \"plain_rounds\": %llu, ",
                  (unsigned long long)c->n_drafted, (unsigned long long)c->n_accepted, accepted(c),
                  tokens_per_round(c), (unsigned long long)c->n_rounds,
                  (unsigned long long)c->n_plain_rounds);
    const struct engine_answer_kv *k = &c->kv;
    strbuf_printf(
        b,
        "\"kv_bytes_per_token\": %.1f, \"kv_shallow_bytes_per_token\": %.1f, "
        "\"kv_deep_bytes_per_token\": %.1f, \"passes\": %llu, \"pass_tokens\": %llu, "
        "\"kernel_shallow_bytes\": %llu, \"kernel_deep_bytes\": %llu, \"listed_shallow_bytes\": "
        "%llu, \"listed_deep_bytes\": %llu, ",
        per(k->shallow_bytes + k->deep_bytes, k->n_tokens), per(k->shallow_bytes, k->n_tokens),
        per(k->deep_bytes, k->n_tokens), (unsigned long long)k->n_passes,
        (unsigned long long)k->n_tokens, (unsigned long long)k->shallow_bytes,
        (unsigned long long)k->deep_bytes, (unsigned long long)k->listed_shallow_bytes,
        (unsigned long long)k->listed_deep_bytes);
    strbuf_printf(b,
                  "\"blocks\": %d, \"kept_blocks\": %d, \"prompts_read_sparsely\": %d, "
                  "\"kv_held_bytes\": %zu, \"resident_bytes\": %zu, \"same_text\": %s, "
                  "\"like_dense\": %.4f, \"selection_share\": %.4g}",
                  c->n_blocks, c->n_kept, c->n_left_out, c->kv_held, c->resident_bytes,
                  boolean(c->same_text), c->like_dense, c->select_share);
}

static void json_point(struct strbuf *b, const struct grid_point *p) {
    strbuf_printf(b,
                  "{\"prompt_tokens\": %d, \"longest_prompt\": %d, \"batch\": %d, \"prompts\": %d, "
                  "\"text_repeats\": %s, \"cells\": [",
                  p->depth, p->n_prompt_tokens, p->batch, p->n_prompts, boolean(p->repeats_text));
    for (int c = 0; c < GRID_CELLS; c++) {
        strbuf_append_str(b, c ? ",\n    " : "\n    ");
        json_cell(b, &p->cell[c], c);
    }
    strbuf_printf(b,
                  "],\n   \"speculation_gain\": %.7g, \"sparse_gain\": %.7g, \"product\": %.7g, "
                  "\"combination\": %.7g, \"share_of_product\": %.7g, \"same_text\": %s, "
                  "\"sparse_ran\": %s, \"bytes_agree\": %s, \"kinds\": [",
                  p->cell[GRID_SPEC].gain, p->cell[GRID_SPARSE].gain, p->product,
                  p->cell[GRID_BOTH].gain, p->share, boolean(p->same_text), boolean(p->ran_sparse),
                  boolean(p->bytes_agree));
    for (int i = 0; i < p->n_kinds; i++)
        strbuf_printf(b,
                      "%s{\"kind\": \"%s\", \"prompts\": %d, \"speculation_gain\": %.4f, "
                      "\"sparse_gain\": %.4f, \"combination\": %.4f}",
                      i ? ", " : "", p->kind[i].name, p->kind[i].n_prompts,
                      p->kind[i].gain[GRID_SPEC], p->kind[i].gain[GRID_SPARSE],
                      p->kind[i].gain[GRID_BOTH]);
    strbuf_append_str(b, "]}");
}

void bench__grid_json(struct strbuf *b, const struct engine *g, const struct bench_grid_options *o,
                      const struct grid_point *p, int n) {
    const struct model_config *d = engine_draft_config(g);
    struct strbuf s = {0};
    bench__grid_settings(&s, g, o);
    strbuf_append_str(b, "{\"model\": ");
    strbuf_append_json(b, engine_model_name(g), strlen(engine_model_name(g)));
    strbuf_printf(b, ", \"random_weights\": %s, \"draft\": ", boolean(engine_is_dummy(g)));
    if (d) strbuf_append_json(b, d->name, strlen(d->name));
    else strbuf_append_str(b, "null");
    strbuf_append_str(b, ", \"sparse\": ");
    strbuf_append_json(b, s.n ? s.data : "", s.n);
    strbuf_printf(b,
                  ", \"repeats\": %d, \"tokens\": %d, \"temperature\": %g, \"prefill\": \"%s\", "
                  "\"points\": [",
                  o->n_repeats, o->n_tokens, o->temperature,
                  o->prefill == GRID_PREFILL_TURN   ? "turn"
                  : o->prefill == GRID_PREFILL_ONCE ? "once"
                                                    : "cell");
    for (int i = 0; i < n; i++) {
        strbuf_append_str(b, i ? ",\n  " : "\n  ");
        json_point(b, &p[i]);
    }
    strbuf_append_str(b, "\n]}\n");
    strbuf_deinit(&s);
}
