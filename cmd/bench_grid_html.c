/* `tandem bench --grid` as one page: style, numbers and plots (SVG) inside it, nothing from
 * elsewhere, no scripts. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "cmd/bench_grid.h"
#include "cmd/text.h"

enum { BAR_LEFT = 130, BAR_WIDTH = 400, BAR_STEP = 30, BAR_HEIGHT = 20 };

static const char style[] =
    ":root{color-scheme:light dark;--ink:#1b1f24;--soft:#5d6670;--line:#d4d9df;--page:#ffffff;"
    "--c0:#8a94a0;--c1:#2f6fd0;--c2:#1f8f63;--c3:#b0541a;--pale:.45}\n"
    "@media (prefers-color-scheme:dark){:root{--ink:#e6e9ed;--soft:#9aa4af;--line:#39414a;"
    "--page:#15181c;--c0:#77818d;--c1:#6aa2f5;--c2:#4fc396;--c3:#e58f52}}\n"
    "body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);"
    "max-width:1280px;margin:2rem auto;padding:0 1rem}\n"
    "h1{font-size:1.5rem;margin:0}h2{font-size:1.15rem;margin:2.2rem 0 .4rem;"
    "border-top:1px solid var(--line);padding-top:1.2rem}\n"
    "h3{font-size:.95rem;margin:.2rem 0;font-weight:600}p{margin:.3rem 0;color:var(--soft)}\n"
    "b{color:var(--ink)}.wide{overflow-x:auto}\n"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums;margin:.6rem 0}\n"
    "th,td{padding:.25rem .5rem;text-align:right;border-bottom:1px solid var(--line);"
    "white-space:nowrap}th{font-weight:600;color:var(--soft);font-size:.85rem}\n"
    "td:first-child,th:first-child{text-align:left}\n"
    ".plots{display:flex;flex-wrap:wrap;gap:1rem 2rem}figure{margin:.4rem 0}\n"
    "svg{max-width:100%;height:auto}svg text{font:13px system-ui,sans-serif;fill:var(--ink)}\n"
    "svg .soft{fill:var(--soft);font-size:12px}svg .axis{stroke:var(--line)}\n"
    ".bad{color:#c0392b;font-weight:600}\n";

static void append_text(struct strbuf *b, const char *s) {
    for (; *s; s++) {
        if (*s == '<') strbuf_append_str(b, "&lt;");
        else if (*s == '>') strbuf_append_str(b, "&gt;");
        else if (*s == '&') strbuf_append_str(b, "&amp;");
        else if (*s == '"') strbuf_append_str(b, "&quot;");
        else if ((unsigned char)*s >= 0x20) strbuf_append_char(b, *s);
    }
}

static double per(uint64_t sum, uint64_t n) {
    return n ? (double)sum / (double)n : 0;
}

/* ---- Plots ---- */

/* One bar: two parts end to end (the second paler; 0: none), a label before, a value behind. */
struct bar {
    const char *label;
    int colour; /* 0..3 */
    double value, more;
    char shown[48];
};

static void bars(struct strbuf *b, const char *title, const struct bar *v, int n) {
    double most = 0;
    for (int i = 0; i < n; i++) most = fmax(most, v[i].value + v[i].more);
    strbuf_printf(b,
                  "<figure><h3>%s</h3><svg width=\"%d\" height=\"%d\" viewBox=\"0 0 %d %d\" "
                  "role=\"img\" aria-label=\"%s\">\n",
                  title, BAR_LEFT + BAR_WIDTH, n * BAR_STEP + 4, BAR_LEFT + BAR_WIDTH,
                  n * BAR_STEP + 4, title);
    for (int i = 0; i < n; i++) {
        int y = i * BAR_STEP + 4, room = BAR_WIDTH - 120;
        double w = most > 0 ? v[i].value / most * room : 0;
        double w2 = most > 0 ? v[i].more / most * room : 0;
        strbuf_printf(b,
                      "<text x=\"%d\" y=\"%d\" text-anchor=\"end\">%s</text>"
                      "<rect x=\"%d\" y=\"%d\" width=\"%.1f\" height=\"%d\" fill=\"var(--c%d)\">"
                      "<title>%s</title></rect>",
                      BAR_LEFT - 8, y + 15, v[i].label, BAR_LEFT, y, w, BAR_HEIGHT, v[i].colour,
                      v[i].shown);
        if (w2 > 0)
            strbuf_printf(b,
                          "<rect x=\"%.1f\" y=\"%d\" width=\"%.1f\" height=\"%d\" "
                          "fill=\"var(--c%d)\" opacity=\".45\"/>",
                          BAR_LEFT + w, y, w2, BAR_HEIGHT, v[i].colour);
        strbuf_printf(b, "<text x=\"%.1f\" y=\"%d\">%s</text>\n", BAR_LEFT + w + w2 + 6, y + 15,
                      v[i].shown);
    }
    strbuf_append_str(b, "</svg></figure>\n");
}

static void plot_times(struct strbuf *b, const struct grid_point *p) {
    struct bar v[GRID_CELLS];
    for (int c = 0; c < GRID_CELLS; c++) {
        v[c] = (struct bar){bench__grid_cell_name(c), c, p->cell[c].tpot_ms, 0, ""};
        snprintf(v[c].shown, sizeof v[c].shown, "%.2f ms", p->cell[c].tpot_ms);
    }
    bars(b, "Time per token (less is better)", v, GRID_CELLS);
}

static void plot_gains(struct strbuf *b, const struct grid_point *p) {
    struct bar v[] = {
        {"speculation", 1, p->cell[GRID_SPEC].gain, 0, ""},
        {"sparse reading", 2, p->cell[GRID_SPARSE].gain, 0, ""},
        {"their product", 0, p->product, 0, ""},
        {"both, measured", 3, p->cell[GRID_BOTH].gain, 0, ""},
    };
    for (int i = 0; i < 4; i++) snprintf(v[i].shown, sizeof v[i].shown, "%.2fx", v[i].value);
    snprintf(v[3].shown, sizeof v[3].shown, "%.2fx (%.0f %%)", v[3].value, 100 * p->share);
    bars(b, "Gain over off / dense", v, 4);
}

static void plot_bytes(struct strbuf *b, const struct grid_point *p) {
    struct bar v[GRID_CELLS];
    for (int c = 0; c < GRID_CELLS; c++) {
        const struct engine_answer_kv *k = &p->cell[c].kv;
        v[c] = (struct bar){bench__grid_cell_name(c), c, per(k->shallow_bytes, k->n_tokens),
                            per(k->deep_bytes, k->n_tokens), ""};
        snprintf(v[c].shown, sizeof v[c].shown, "%s", cmd_bytes(v[c].value + v[c].more));
    }
    bars(b, "K and V read per token: shallow layers, deep layers (pale)", v, GRID_CELLS);
}

static void plot_waiting(struct strbuf *b, const struct grid_point *p) {
    struct bar v[GRID_CELLS];
    for (int c = 0; c < GRID_CELLS; c++) {
        v[c] = (struct bar){bench__grid_cell_name(c), c, p->cell[c].ttft_ms, 0, ""};
        if (p->cell[c].ttft_ms > 0)
            snprintf(v[c].shown, sizeof v[c].shown, "%.0f ms", p->cell[c].ttft_ms);
        else snprintf(v[c].shown, sizeof v[c].shown, "cached");
    }
    bars(b, "Time to first token, prompts computed whole", v, GRID_CELLS);
}

/* The cells' names where their lines end, none over another. */
static void label_ends(struct strbuf *b, double x, const double y_end[GRID_CELLS]) {
    enum { HEIGHT = 15 };
    double floor_y = -1e9;
    bool done[GRID_CELLS] = {false};
    for (int i = 0; i < GRID_CELLS; i++) {
        int top = -1;
        for (int c = 0; c < GRID_CELLS; c++)
            if (!done[c] && (top < 0 || y_end[c] < y_end[top])) top = c;
        double y = fmax(y_end[top], floor_y);
        done[top] = true;
        floor_y = y + HEIGHT;
        strbuf_printf(b, "<text x=\"%.1f\" y=\"%.1f\" style=\"fill:var(--c%d)\">%s</text>\n", x,
                      y + 4, top, bench__grid_cell_name(top));
    }
}

/* Time per token by prompt length, a line a cell, of the points of one batch size; both axes
 * logarithmic. */
static void plot_depths(struct strbuf *b, const struct grid_point *p, int n, int batch) {
    enum { LEFT = 72, TOP = 16, WIDTH = 640, HEIGHT = 280 };
    double x0 = 1e300, x1 = 0, y0 = 1e300, y1 = 0;
    int n_here = 0;
    for (int i = 0; i < n; i++) {
        if (p[i].batch != batch) continue;
        n_here++;
        x0 = fmin(x0, p[i].depth), x1 = fmax(x1, p[i].depth);
        for (int c = 0; c < GRID_CELLS; c++) {
            if (!(p[i].cell[c].tpot_ms > 0)) return;
            y0 = fmin(y0, p[i].cell[c].tpot_ms), y1 = fmax(y1, p[i].cell[c].tpot_ms);
        }
    }
    if (n_here < 2 || !(x1 > x0)) return;
    y0 /= 1.15, y1 *= 1.15;
#define X(v) (LEFT + log((v) / x0) / log(x1 / x0) * (WIDTH - LEFT - 110))
#define Y(v) (TOP + HEIGHT - log((v) / y0) / log(y1 / y0) * HEIGHT)
    strbuf_printf(b,
                  "<figure><h3>Time per token by prompt length, %d at once</h3><svg width=\"%d\" "
                  "height=\"%d\" viewBox=\"0 0 %d %d\" role=\"img\">\n",
                  batch, WIDTH, HEIGHT + 50, WIDTH, HEIGHT + 50);
    for (int k = 0; k <= 4; k++) {
        double v = y0 * pow(y1 / y0, k / 4.0);
        strbuf_printf(
            b,
            "<line class=\"axis\" x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\"/>"
            "<text class=\"soft\" x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%.3g ms</text>\n",
            LEFT, WIDTH - 110, Y(v), Y(v), LEFT - 6, Y(v) + 4, v);
    }
    for (int i = 0; i < n; i++)
        if (p[i].batch == batch)
            strbuf_printf(b,
                          "<text class=\"soft\" x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%d"
                          "</text>\n",
                          X(p[i].depth), TOP + HEIGHT + 20, p[i].depth);
    double x_end = 0, y_end[GRID_CELLS];
    for (int c = 0; c < GRID_CELLS; c++) {
        strbuf_printf(
            b, "<polyline fill=\"none\" stroke=\"var(--c%d)\" stroke-width=\"2\" points=\"", c);
        for (int i = 0; i < n; i++) {
            if (p[i].batch != batch) continue;
            x_end = X(p[i].depth), y_end[c] = Y(p[i].cell[c].tpot_ms);
            strbuf_printf(b, "%.1f,%.1f ", x_end, y_end[c]);
        }
        strbuf_append_str(b, "\"/>\n");
    }
    label_ends(b, x_end + 6, y_end);
#undef X
#undef Y
    strbuf_append_str(b, "</svg></figure>\n");
}

/* ---- Tables ---- */

static void table(struct strbuf *b, const struct grid_point *p) {
    strbuf_append_str(
        b, "<div class=\"wide\"><table><tr><th>speculation / reading</th><th>TTFT ms</th><th>first "
           "turn ms/t</th><th>ms/token</th><th>ITL p50</th><th>ITL p99</th><th>tokens/s</th>"
           "<th>accepted</th><th>tokens a round</th><th>KV read/token</th><th>blocks</th><th>KV "
           "held</th><th>gain</th></tr>\n");
    for (int c = 0; c < GRID_CELLS; c++) {
        const struct grid_cell *v = &p->cell[c];
        uint64_t n_rounds = v->n_rounds + v->n_plain_rounds;
        char blocks[32] = "all", drafts[32] = "&ndash;", ttft[32] = "cached";
        if (v->ttft_ms > 0) snprintf(ttft, sizeof ttft, "%.1f", v->ttft_ms);
        if (v->n_kept < v->n_blocks)
            snprintf(blocks, sizeof blocks, "%d of %d", v->n_kept, v->n_blocks);
        if (v->n_drafted)
            snprintf(drafts, sizeof drafts, "%.0f %%", 100 * per(v->n_accepted, v->n_drafted));
        strbuf_printf(
            b,
            "<tr><td>%s</td><td>%s</td><td>%.2f</td><td>%.2f</td><td>%.2f</td><td>%.2f</td>"
            "<td>%.1f</td><td>%s</td><td>%.2f</td><td>%s</td><td>%s</td><td>%s</td><td>%.2fx</td>"
            "</tr>\n",
            bench__grid_cell_name(c), ttft, v->first_tpot_ms, v->tpot_ms, v->itl_p50_ms,
            v->itl_p99_ms, v->tokens_per_s, drafts, 1 + per(v->n_accepted, n_rounds),
            cmd_bytes(per(v->kv.shallow_bytes + v->kv.deep_bytes, v->kv.n_tokens)), blocks,
            cmd_bytes((double)v->kv_held), v->gain);
    }
    strbuf_append_str(b, "</table></div>\n");
}

static void say(struct strbuf *b, bool good, const char *yes, const char *no) {
    strbuf_printf(b, good ? "<p>%s</p>\n" : "<p class=\"bad\">%s</p>\n", good ? yes : no);
}

static void kinds(struct strbuf *b, const struct grid_point *p) {
    if (p->n_kinds < 2) return;
    strbuf_append_str(b, "<table><tr><th>question</th><th>speculation</th><th>sparse</th><th>both"
                         "</th></tr>\n");
    for (int i = 0; i < p->n_kinds; i++)
        strbuf_printf(b, "<tr><td>%s</td><td>%.2fx</td><td>%.2fx</td><td>%.2fx</td></tr>\n",
                      p->kind[i].name, p->kind[i].gain[GRID_SPEC], p->kind[i].gain[GRID_SPARSE],
                      p->kind[i].gain[GRID_BOTH]);
    strbuf_append_str(b, "</table>\n");
}

static void point(struct strbuf *b, const struct grid_point *p,
                  const struct bench_grid_options *o) {
    strbuf_printf(b,
                  "<h2>Prompts of %d tokens, %d at once</h2><p>%d prompt%s, answers of up to %d "
                  "tokens%s. Together <b>%.2fx</b>: speculation %.2fx times sparse reading %.2fx "
                  "would be %.2fx; %.0f %% of that is reached.</p>\n",
                  p->n_prompt_tokens, p->batch, p->n_prompts, p->n_prompts == 1 ? "" : "s",
                  o->n_tokens, p->repeats_text ? " (the text repeats in a prompt)" : "",
                  p->cell[GRID_BOTH].gain, p->cell[GRID_SPEC].gain, p->cell[GRID_SPARSE].gain,
                  p->product, 100 * p->share);
    table(b, p);
    strbuf_append_str(b, "<div class=\"plots\">\n");
    plot_times(b, p);
    plot_gains(b, p);
    plot_bytes(b, p);
    plot_waiting(b, p);
    strbuf_append_str(b, "</div>\n");
    kinds(b, p);
    say(b, p->ran_sparse, "The sparse path ran for every prompt of the sparse cells.",
        "Not every prompt of the sparse cells was read sparsely.");
    say(b, p->bytes_agree, "Bytes that the kernels counted are those of the lists, in every cell.",
        "Bytes that the kernels counted are not those of the lists (rounds of more rows than a "
        "tile holds read pages again).");
    say(b, p->same_text, "With speculation the text is the same as without, dense and sparse.",
        "With speculation the text is NOT the same as without.");
    strbuf_printf(b, "<p>Sparse answers follow the dense ones for %.0f %% of their tokens.</p>\n",
                  100 * p->cell[GRID_SPARSE].like_dense);
}

void bench__grid_html(struct strbuf *b, const struct engine *g, const struct bench_grid_options *o,
                      const struct grid_point *p, int n) {
    const struct model_config *d = engine_draft_config(g);
    struct strbuf s = {0};
    bench__grid_settings(&s, g, o);
    strbuf_append_str(b, "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
                         "<meta name=\"viewport\" content=\"width=device-width\"><title>"
                         "Speculation x sparse reading</title><style>\n");
    strbuf_append_str(b, style);
    strbuf_append_str(b, "</style></head><body>\n<h1>Speculation &times; sparse reading</h1>\n<p>");
    append_text(b, engine_model_name(g));
    strbuf_append_str(b, "; draft: ");
    append_text(b, d ? d->name : "prompt lookup alone");
    strbuf_append_str(b, "; sparse: ");
    append_text(b, s.n ? s.data : "");
    strbuf_printf(b,
                  ".</p>\n<p>Medians of %d turns, the four cells interleaved, after a first one. "
                  "Time to first "
                  "token is of prompts computed whole: %s. KV read is what the "
                  "target's attention kernels counted in passes of answers alone.</p>\n",
                  o->n_repeats, bench__grid_prefill(o));
    if (engine_is_dummy(g)) strbuf_printf(b, "<p class=\"bad\">%s</p>\n", bench__grid_dummy);
    for (int j = 0; j < o->n_batches; j++) plot_depths(b, p, n, o->batches[j]);
    for (int i = 0; i < n; i++) point(b, &p[i], o);
    strbuf_append_str(b, "</body></html>\n");
    strbuf_deinit(&s);
}
