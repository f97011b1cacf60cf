/* The memory plan as a table for people and as JSON for programs. */
#include <string.h>

#include "base/strbuf.h"
#include "kvpool/plan.h"

/* 1769472 as "1,769,472", right-aligned in `width`. */
static void append_grouped(struct strbuf *out, unsigned long long n, int width) {
    char text[32];
    int at = sizeof text, digits = 0;
    text[--at] = 0;
    do {
        if (digits && digits % 3 == 0) text[--at] = ',';
        text[--at] = (char)('0' + n % 10);
        digits++;
        n /= 10;
    } while (n);
    strbuf_printf(out, "%*s", width, text + at);
}

static void append_human(struct strbuf *out, size_t bytes) {
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double x = (double)bytes;
    int unit = 0;
    while (x >= 1024 && unit < 4) {
        x /= 1024;
        unit++;
    }
    strbuf_printf(out, unit ? "%7.1f %-3s" : "%7.0f %-3s", x, units[unit]);
}

static void append_line(struct strbuf *out, const char *name, size_t bytes, const char *place,
                        const char *note) {
    strbuf_printf(out, "%-22s", name);
    append_grouped(out, bytes, 20);
    strbuf_append_str(out, "  ");
    append_human(out, bytes);
    strbuf_printf(out, "  %-6s", place);
    if (*note) strbuf_printf(out, "  %s", note);
    /* No blanks at the end of a line. */
    while (out->n && out->data[out->n - 1] == ' ') out->data[--out->n] = 0;
    strbuf_append_char(out, '\n');
}

static const char *place_name(const struct plan *p, enum plan_place place) {
    return place == PLAN_HOST || p->device_is_host ? "host" : "device";
}

static void append_classes(const struct plan *p, struct strbuf *out) {
    for (int c = 0; c < KVPOOL_N_CLASSES; c++) {
        size_t page = p->geometry.page_bytes[c];
        if (!page) continue;
        strbuf_printf(out, "  %-8s", kvpool_class_name((enum kvpool_class)c));
        append_grouped(out, page, 12);
        strbuf_printf(out, " bytes a page (%d layers, %d tokens),", p->pool.shape[c].n_layers,
                      KVPOOL_BLOCK);
        append_grouped(out, page / KVPOOL_BLOCK, 8);
        strbuf_append_str(out, " a token");
        if (p->pool.shape[c].state_bytes > 0) {
            strbuf_append_str(out, ", representatives ");
            append_grouped(out, (size_t)p->pool.shape[c].state_bytes, 0);
            strbuf_append_str(out, " a page");
        }
        if (p->pool.min_bytes[c]) {
            strbuf_append_str(out, ", guaranteed ");
            append_grouped(out, (size_t)p->geometry.min_extents[c] * p->geometry.extent_bytes, 0);
        }
        strbuf_append_char(out, '\n');
    }
}

void plan_render_text(const struct plan *p, struct strbuf *out) {
    for (int i = 0; i < p->n_lines; i++) {
        const struct plan_line *l = &p->lines[i];
        append_line(out, l->name, l->bytes, place_name(p, l->place), l->note);
        if (!strcmp(l->name, "KV pool")) append_classes(p, out);
    }
    if (p->device_is_host) {
        append_line(out, "sum", p->device_bytes + p->host_bytes, "host", "");
    } else {
        append_line(out, "sum on the device", p->device_bytes, "device", "");
        append_line(out, "sum on the host", p->host_bytes, "host", "");
    }
    if (p->margin_bytes)
        append_line(out, "kept free", p->margin_bytes, place_name(p, PLAN_DEVICE), "");
    if (p->budget_bytes)
        append_line(out, "budget", p->budget_bytes, place_name(p, PLAN_DEVICE), "");
    strbuf_append_str(out, "fits: ");
    append_grouped(out, (unsigned long long)p->tokens_fit, 0);
    strbuf_printf(out,
                  " tokens; %d of %d sequences at %d tokens each; one sequence up to %d; %d at "
                  "once up to %d\n",
                  p->seqs_at_context, p->pool.max_seqs, p->context, p->largest_context,
                  p->pool.max_seqs, p->context_for_all);
    for (int i = 0; i < p->n_advice; i++) strbuf_printf(out, "note: %s\n", p->advice[i]);
}

/* ---- JSON ---- */

static void json_text(struct strbuf *out, const char *key, const char *value) {
    strbuf_printf(out, "\"%s\":", key);
    strbuf_append_json(out, value, strlen(value));
}

static void json_lines(const struct plan *p, struct strbuf *out) {
    strbuf_append_str(out, "\"lines\":[");
    for (int i = 0; i < p->n_lines; i++) {
        const struct plan_line *l = &p->lines[i];
        strbuf_append_str(out, i ? ",{" : "{");
        json_text(out, "name", l->name);
        strbuf_printf(out, ",\"bytes\":%zu,", l->bytes);
        json_text(out, "place", place_name(p, l->place));
        strbuf_append_char(out, ',');
        json_text(out, "note", l->note);
        strbuf_append_char(out, '}');
    }
    strbuf_append_str(out, "]");
}

static void json_pool(const struct plan *p, struct strbuf *out) {
    strbuf_printf(out,
                  "\"pool\":{\"arena_bytes\":%zu,\"host_bytes\":%zu,\"extent_bytes\":%zu,"
                  "\"n_extents\":%d,\"max_seqs\":%d,\"max_blocks\":%d,\"max_cached\":%d,"
                  "\"block_tokens\":%d,\"classes\":[",
                  p->pool.arena_bytes, p->pool_host_bytes, p->geometry.extent_bytes,
                  p->geometry.n_extents, p->pool.max_seqs, p->pool.max_blocks, p->pool.max_cached,
                  KVPOOL_BLOCK);
    bool first = true;
    for (int c = 0; c < KVPOOL_N_CLASSES; c++) {
        size_t page = kvpool_page_bytes(&p->pool.shape[c]);
        if (!page) continue;
        strbuf_printf(out,
                      "%s{\"name\":\"%s\",\"layers\":%d,\"page_bytes\":%zu,\"bytes_per_token\":%zu,"
                      "\"state_bytes\":%d,\"pages_per_extent\":%d,\"guaranteed_bytes\":%zu}",
                      first ? "" : ",", kvpool_class_name((enum kvpool_class)c),
                      p->pool.shape[c].n_layers, page, page / KVPOOL_BLOCK,
                      p->pool.shape[c].state_bytes, p->geometry.pages_per_extent[c],
                      (size_t)p->geometry.min_extents[c] * p->geometry.extent_bytes);
        first = false;
    }
    strbuf_append_str(out, "]}");
}

void plan_render_json(const struct plan *p, struct strbuf *out) {
    strbuf_append_char(out, '{');
    json_lines(p, out);
    strbuf_printf(out,
                  ",\"device_bytes\":%zu,\"host_bytes\":%zu,\"budget_bytes\":%zu,"
                  "\"margin_bytes\":%zu,\"device_is_host\":%s,",
                  p->device_bytes, p->host_bytes, p->budget_bytes, p->margin_bytes,
                  p->device_is_host ? "true" : "false");
    json_pool(p, out);
    strbuf_printf(out,
                  ",\"fits\":%s,\"tokens_fit\":%lld,\"context\":%d,\"lookahead\":%d,"
                  "\"seqs_at_context\":%d,\"largest_context\":%d,\"context_for_all\":%d,",
                  p->fits ? "true" : "false", p->tokens_fit, p->context, p->lookahead,
                  p->seqs_at_context, p->largest_context, p->context_for_all);
    /* Sequences by context, doubling: the answer to "how many clients at N". */
    strbuf_append_str(out, "\"seqs_by_context\":[");
    long long n = 1024;
    for (int i = 0; n / 2 < p->context || i == 0; i++, n *= 2) {
        int context = n < p->context ? (int)n : p->context;
        strbuf_printf(out, "%s{\"context\":%d,\"seqs\":%d}", i ? "," : "", context,
                      plan_seqs_for(p, context));
    }
    strbuf_append_str(out, "],\"advice\":[");
    for (int i = 0; i < p->n_advice; i++) {
        if (i) strbuf_append_char(out, ',');
        strbuf_append_json(out, p->advice[i], strlen(p->advice[i]));
    }
    strbuf_append_str(out, "]}");
}
