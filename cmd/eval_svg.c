#include "cmd/eval_svg.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

/* Pixels. Maps stand in rows of up to PER_ROW. */
enum {
    PER_ROW = 4,
    CELL_W = 58,
    CELL_H = 30,
    LEFT = 46,   /* of a map, for depths */
    TOP = 42,    /* for its name and share */
    BOTTOM = 34, /* for lengths */
    GAP = 26,
    MARGIN = 24,
    HEAD = 66,
    FOOT = 64,
};

/* Dark blue over teal to light yellow: lightness grows with the share, so that it reads in print
 * and to those who do not tell red from green. */
static void colour_of(double share, char out[8], bool *dark) {
    static const double stop[][3] = {
        {48, 18, 84}, {56, 88, 140}, {31, 150, 139}, {115, 208, 85}, {253, 231, 37}};
    double at = fmin(fmax(share, 0), 1) * 4;
    int i = at >= 4 ? 3 : (int)at;
    double f = at - i, rgb[3];
    for (int c = 0; c < 3; c++) rgb[c] = stop[i][c] + f * (stop[i + 1][c] - stop[i][c]);
    snprintf(out, 8, "#%02x%02x%02x", (unsigned)rgb[0] & 255u, (unsigned)rgb[1] & 255u,
             (unsigned)rgb[2] & 255u);
    *dark = 0.30 * rgb[0] + 0.59 * rgb[1] + 0.11 * rgb[2] < 140;
}

static void append_escaped(struct strbuf *b, const char *s) {
    for (; *s; s++) {
        if (*s == '<') strbuf_append_str(b, "&lt;");
        else if (*s == '>') strbuf_append_str(b, "&gt;");
        else if (*s == '&') strbuf_append_str(b, "&amp;");
        else if (*s == '"') strbuf_append_str(b, "&quot;");
        else if ((unsigned char)*s >= 32) strbuf_append_char(b, *s);
    }
}

static void append_text(struct strbuf *b, double x, double y, const char *kind, const char *s) {
    strbuf_printf(b, "<text x=\"%.0f\" y=\"%.0f\" class=\"%s\">", x, y, kind);
    append_escaped(b, s);
    strbuf_append_str(b, "</text>\n");
}

static void append_cell(struct strbuf *b, const struct eval_heat *h, double share, int count, int x,
                        int y, const char *name, int depth, int length) {
    char fill[8] = "#ffffff", text[16] = "";
    bool dark = false, known = !isnan(share);
    if (known) {
        colour_of(share, fill, &dark);
        snprintf(text, sizeof text, "%.2f", share);
    }
    strbuf_printf(b,
                  "<g><rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" fill=\"%s\" "
                  "stroke=\"#fff\"/><title>",
                  x, y, CELL_W, CELL_H, fill);
    append_escaped(b, name);
    strbuf_printf(b, ": %d tokens, depth %.0f %%, ", h->lengths[length], 100 * h->depths[depth]);
    if (known) strbuf_printf(b, "%.3f of %d</title>", share, count);
    else strbuf_append_str(b, "nothing asked</title>");
    strbuf_printf(b, "<text x=\"%d\" y=\"%d\" class=\"cell\" style=\"fill:%s\">%s</text></g>\n",
                  x + CELL_W / 2, y + CELL_H / 2 + 4, dark ? "#fff" : "#222", known ? text : "-");
}

static void append_map(struct strbuf *b, const struct eval_heat *h, int map, int x, int y) {
    char text[64];
    append_text(b, x + LEFT, y + 14, "name", h->names[map]);
    snprintf(text, sizeof text, "found %.3f", h->whole[map]);
    append_text(b, x + LEFT, y + 31, "small", isnan(h->whole[map]) ? "nothing asked" : text);
    for (int d = 0; d < h->n_depths; d++) {
        int cy = y + TOP + d * CELL_H;
        snprintf(text, sizeof text, "%.0f %%", 100 * h->depths[d]);
        append_text(b, x + LEFT - 6, cy + CELL_H / 2 + 4, "side", text);
        for (int l = 0; l < h->n_lengths; l++) {
            size_t cell = (size_t)d * (size_t)h->n_lengths + (size_t)l;
            size_t cells = (size_t)h->n_depths * (size_t)h->n_lengths;
            append_cell(b, h, h->share[(size_t)map * cells + cell], h->count[cell],
                        x + LEFT + l * CELL_W, cy, h->names[map], d, l);
        }
    }
    for (int l = 0; l < h->n_lengths; l++) {
        snprintf(text, sizeof text, "%d", h->lengths[l]);
        append_text(b, x + LEFT + l * CELL_W + CELL_W / 2, y + TOP + h->n_depths * CELL_H + 16,
                    "low", text);
    }
}

static void append_scale(struct strbuf *b, int x, int y) {
    for (int i = 0; i < 100; i++) {
        char fill[8];
        bool dark;
        colour_of(i / 99.0, fill, &dark);
        strbuf_printf(b, "<rect x=\"%d\" y=\"%d\" width=\"2\" height=\"10\" fill=\"%s\"/>\n",
                      x + 2 * i, y, fill);
    }
    append_text(b, x, y + 24, "small", "0");
    append_text(b, x + 190, y + 24, "small", "1");
    append_text(b, x + 214, y + 10, "small",
                "share of prompts whose answer holds the fact; across: tokens of the prompt, down: "
                "how deep the fact lies in it");
}

void eval_svg_append(struct strbuf *b, const struct eval_heat *h) {
    int map_w = LEFT + h->n_lengths * CELL_W, map_h = TOP + h->n_depths * CELL_H + BOTTOM;
    if (map_w < 190) map_w = 190; /* a name's width */
    int across = h->n_maps < PER_ROW ? h->n_maps : PER_ROW;
    int down = (h->n_maps + PER_ROW - 1) / PER_ROW;
    int w = 2 * MARGIN + across * map_w + (across - 1) * GAP;
    int height = HEAD + down * map_h + (down - 1) * GAP + FOOT;
    if (w < 2 * MARGIN + 860) w = 2 * MARGIN + 860; /* of the text below */
    strbuf_printf(b,
                  "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" "
                  "viewBox=\"0 0 %d %d\" font-family=\"Helvetica, Arial, sans-serif\">\n"
                  "<style>text{fill:#222}.title{font-size:18px;font-weight:bold}.name{font-size:"
                  "14px;font-weight:bold}.small{font-size:12px;fill:#555}.side{font-size:11px;"
                  "text-anchor:end;fill:#555}.low{font-size:11px;text-anchor:middle;fill:#555}"
                  ".cell{font-size:12px;text-anchor:middle}</style>\n"
                  "<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n",
                  w, height, w, height);
    append_text(b, MARGIN, MARGIN + 8, "title", h->title);
    append_text(b, MARGIN, MARGIN + 28, "small", h->subtitle);
    for (int i = 0; i < h->n_maps; i++)
        append_map(b, h, i, MARGIN + i % PER_ROW * (map_w + GAP),
                   HEAD + i / PER_ROW * (map_h + GAP));
    append_scale(b, MARGIN, height - FOOT + 20);
    strbuf_append_str(b, "</svg>\n");
}
