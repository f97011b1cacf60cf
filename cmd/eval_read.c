/* Running text: what follows a prompt is forced through every column's list, and what the first 64
 * tokens behind it attend to, densely, is what lists are judged by. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/rng.h"
#include "cmd/eval_run.h"

const double eval_share[EVAL_SHARES] = {.05, .10, .20};

/* ---- Blocks by their attention ---- */

static int pinned_of(int n_blocks, int n_window) {
    return n_window < n_blocks ? n_window + 1 : n_blocks;
}

struct ranked {
    float mass;
    int block;
};
static int by_mass(const void *a, const void *b) {
    const struct ranked *x = a, *y = b;
    if (x->mass != y->mass) return x->mass > y->mass ? -1 : 1;
    return x->block - y->block;
}

/* Mark the k best blocks that are not pinned. */
static void mark_best(const float *mass, int n, int n_window, int k, uint8_t *mark) {
    struct ranked *r = malloc(sizeof *r * (size_t)(n ? n : 1));
    int count = 0;
    memset(mark, 0, (size_t)n);
    for (int i = 1; r && i < n - n_window; i++) r[count++] = (struct ranked){mass[i], i};
    if (r && count > 0) qsort(r, (size_t)count, sizeof *r, by_mass);
    for (int i = 0; i < k && i < count; i++) mark[r[i].block] = 1;
    free(r);
}

double eval_recall(const float *truth, int n_blocks, const int32_t *kept, int n_kept,
                   int n_window) {
    int k = n_kept - pinned_of(n_blocks, n_window), found = 0;
    uint8_t *mark = k > 0 ? malloc((size_t)n_blocks) : NULL;
    if (!mark) return 1;
    mark_best(truth, n_blocks, n_window, k, mark);
    for (int i = 0; i < n_kept; i++) found += mark[kept[i]];
    free(mark);
    return (double)found / k;
}

/* ---- What attention does ---- */

/* Room for the masses of one text. */
struct view {
    float *all;   /* [blocks] mean over deep layers and heads */
    float *layer; /* [layers][blocks] mean over a layer's heads */
    float *head;  /* [layers][KV heads][blocks] mean over the query heads that read it */
    /* [layers][KV heads][4 * blocks] of the quarters, the most over the query heads of a KV head,
     * added up over the rows that were looked at; NULL: nobody asked. And the mean over those. */
    float *quarter, *all_quarters;
    float *sorted;
    uint8_t *mark, *mark_first;
    int n_blocks, n_layers, n_kv_heads;
};

static void view_close(struct view *v) {
    free(v->all);
    free(v->head);
    free(v->quarter);
    free(v->all_quarters);
    free(v->layer);
    free(v->sorted);
    free(v->mark);
    free(v->mark_first);
}

static int view_open(struct view *v, int n_blocks, int n_layers, int n_kv_heads, bool quarters,
                     struct err *e) {
    size_t n = (size_t)n_blocks, l = (size_t)n_layers, q = quarters ? TARGET_QUARTERS * n : 0;
    *v = (struct view){.all = malloc(sizeof(float) * n),
                       .layer = malloc(sizeof(float) * n * l),
                       .head = malloc(sizeof(float) * n * l * (size_t)n_kv_heads),
                       .quarter = calloc(q * l * (size_t)n_kv_heads + 1, sizeof(float)),
                       .all_quarters = calloc(q + 1, sizeof(float)),
                       .sorted = malloc(sizeof(float) * TARGET_QUARTERS * n),
                       .mark = malloc(n),
                       .mark_first = malloc(n),
                       .n_blocks = n_blocks,
                       .n_layers = n_layers,
                       .n_kv_heads = n_kv_heads};
    if (v->all && v->layer && v->head && v->quarter && v->all_quarters && v->sorted && v->mark &&
        v->mark_first)
        return 0;
    view_close(v);
    return err_raise(e, E_NOMEM, "no memory for the attention of %d blocks", n_blocks);
}

static int falling(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return x > y ? -1 : x < y;
}

/* Share that the best `k` of n numbers hold, of the last one the part that k leaves it; the numbers
 * stay. */
static double share_of_best(const float *x, int n, double k, float *scratch) {
    double sum = 0, best = 0;
    memcpy(scratch, x, sizeof *x * (size_t)n);
    qsort(scratch, (size_t)n, sizeof *scratch, falling);
    for (int i = 0; i < n; i++) {
        sum += scratch[i];
        best += scratch[i] * fmin(fmax(k - i, 0), 1);
    }
    return sum > 0 ? best / sum : 0;
}

static void read_masses(struct view *v, const struct target_masses *m) {
    float part = 1.0f / (float)m->n_heads;
    int per = m->n_heads / v->n_kv_heads; /* query heads of a KV head */
    memset(v->all, 0, sizeof *v->all * (size_t)v->n_blocks);
    memset(v->layer, 0, sizeof *v->layer * (size_t)v->n_blocks * (size_t)v->n_layers);
    memset(v->head, 0,
           sizeof *v->head * (size_t)v->n_blocks * (size_t)v->n_layers * (size_t)v->n_kv_heads);
    for (int l = 0; l < m->n_layers; l++) {
        float *to = v->layer + (size_t)l * (size_t)v->n_blocks;
        for (int h = 0; h < m->n_heads; h++) {
            const float *from =
                m->mass + ((size_t)l * (size_t)m->n_heads + (size_t)h) * (size_t)m->stride;
            float *own = v->head + (size_t)(l * v->n_kv_heads + h / per) * (size_t)v->n_blocks;
            for (int b = 0; b < v->n_blocks; b++) {
                to[b] += from[b] * part;
                own[b] += from[b] / (float)per;
            }
        }
        for (int b = 0; b < v->n_blocks; b++) v->all[b] += to[b] / (float)m->n_layers;
    }
}

/* What the rows ids[n] behind the prompt, one by one, pay to quarters. */
static int read_quarters(struct eval_bed *b, struct view *v, const int32_t *ids, int n,
                         struct err *e) {
    size_t n_quarters = TARGET_QUARTERS * (size_t)v->n_blocks;
    int n_own = v->n_layers * v->n_kv_heads;
    int rc = target_trace_rewind(b->trace, b->scores.n_tokens, e);
    for (int i = 0; i < n && !rc; i++) {
        struct target_seen seen;
        rc = target_trace_look_apart(b->trace, ids[i], &seen, e);
        for (int own = 0; own < n_own && !rc; own++) {
            const float *from = seen.quarters + (size_t)own * TARGET_QUARTERS * (size_t)seen.stride;
            for (size_t q = 0; q < n_quarters; q++) {
                v->quarter[(size_t)own * n_quarters + q] += from[q];
                v->all_quarters[q] += from[q] / (float)n_own;
            }
        }
    }
    return rc;
}

/* Attention that an oracle keeps of as many tokens in blocks of several sizes, each so many `parts`
 * that lie side by side: sizes of selection against each other. The last block may be shorter. */
static void add_size(double *to, const float *part, int n_parts, int parts, double k,
                     float *scratch) {
    int n = (n_parts + parts - 1) / parts;
    float *block = calloc((size_t)n + 1, sizeof *block);
    for (int i = 0; block && i < n_parts; i++) block[i / parts] += part[i];
    if (block) *to += share_of_best(block, n, k, scratch);
    free(block);
}

static void add_sizes(struct eval_attention *a, const struct view *v, bool quarters) {
    int n = v->n_blocks;
    for (int i = 0; i < EVAL_SIZES; i++) {
        int size = KERN_QUARTER << i; /* tokens */
        double k = (double)a->n_best * TARGET_BLOCK / size;
        if (quarters)
            add_size(&a->by_size[i], v->all_quarters, TARGET_QUARTERS * n, size / KERN_QUARTER, k,
                     v->sorted);
        else if (size >= TARGET_BLOCK)
            add_size(&a->by_size[i], v->all, n, size / TARGET_BLOCK, k, v->sorted);
    }
}

static void add_attention(struct eval_attention *a, struct view *v, const struct target_masses *m,
                          bool quarters, int n_window) {
    int n = v->n_blocks;
    a->n++;
    a->n_layers = m->n_layers;
    for (int l = 0; l < m->n_layers; l++) {
        const float *layer = v->layer + (size_t)l * (size_t)n;
        int same = 0, best = 0;
        for (int h = 0; h < m->n_heads; h++) {
            const float *from =
                m->mass + ((size_t)l * (size_t)m->n_heads + (size_t)h) * (size_t)m->stride;
            for (int s = 0; s < EVAL_SHARES; s++)
                a->top[l][s] += share_of_best(from, n, eval_share[s] * n, v->sorted) / m->n_heads;
        }
        mark_best(layer, n, n_window, a->n_best, l ? v->mark : v->mark_first);
        for (int b = 0; b < n; b++) {
            best += v->mark_first[b];
            same += v->mark_first[b] && (l == 0 || v->mark[b]);
        }
        a->overlap[l] += best ? (double)same / best : 1;
    }
    add_sizes(a, v, quarters);
}

/* ---- One text ---- */

/* The share of `truth` that a list holds. */
static double mass_of(const float *truth, int n_blocks, const struct target_kept *k) {
    double sum = 0, held = 0;
    for (int i = 0; i < n_blocks; i++) sum += (double)truth[i];
    for (int i = 0; i < k->n; i++) held += (double)truth[k->block[i]];
    return sum > 0 ? held / sum : 1;
}

/* Quarters of one list, or of each one's own. */
static double mass_of_quarters(const struct view *v, const struct target_kept *k) {
    size_t n_quarters = TARGET_QUARTERS * (size_t)v->n_blocks;
    double sum = 0, held = 0;
    for (int own = 0; own < v->n_layers * v->n_kv_heads; own++) {
        const float *truth = v->quarter + (size_t)own * n_quarters;
        const struct target_kept *list = k->own ? &k->own[own] : k;
        for (size_t q = 0; q < n_quarters; q++) sum += (double)truth[q];
        for (int i = 0; i < list->n; i++)
            for (int q = 0; q < TARGET_QUARTERS; q++)
                if (list->quarters[i] >> q & 1)
                    held += (double)truth[TARGET_QUARTERS * list->block[i] + q];
    }
    return sum > 0 ? held / sum : 1;
}

/* Several lists, each by the attention of those that read it. */
static void judge_own(const struct target_kept *own, int window, const struct view *v,
                      double *recall, double *mass) {
    int n = v->n_layers * v->n_kv_heads;
    *recall = *mass = 0;
    for (int i = 0; i < n; i++) {
        const float *truth = v->head + (size_t)i * (size_t)v->n_blocks;
        *mass += mass_of(truth, v->n_blocks, &own[i]) / n;
        *recall += eval_recall(truth, v->n_blocks, own[i].block, own[i].n, window) / n;
    }
}

static void judge_lists(const struct eval_bed *b, const struct eval_columns *columns,
                        const struct view *v, struct eval_loss *item) {
    for (int c = 0; c < columns->n; c++) {
        const struct target_kept *k = &b->kept[c];
        int window = columns->at[c].settings.window_blocks;
        item->n_kept[c] = c ? b->n_kept[c] : v->n_blocks;
        item->recall[c] = item->mass[c] = 1;
        if (c == 0 || b->is_dense[c]) continue;
        if (k->own && !k->own->quarters)
            judge_own(k->own, window, v, &item->recall[c], &item->mass[c]);
        else if (k->own || k->quarters) {
            item->recall[c] = NAN; /* which blocks are best says little of quarters */
            item->mass[c] = mass_of_quarters(v, k);
        } else {
            item->mass[c] = mass_of(v->all, v->n_blocks, k);
            item->recall[c] = eval_recall(v->all, v->n_blocks, k->block, k->n, window);
        }
    }
}

/* An earlier column with the very same list; -1: none. What selects anew later is one. */
static int same_list(const struct eval_bed *b, int column) {
    const struct target_kept *k = &b->kept[column];
    for (int c = 1; c < column && !k->own && !k->quarters; c++)
        if (!b->is_dense[c] && !b->kept[c].own && !b->kept[c].quarters && b->kept[c].n == k->n &&
            !memcmp(b->kept[c].block, k->block, sizeof *k->block * (size_t)k->n))
            return c;
    return -1;
}

/* Loss of ids[n] through every column's list. */
static int force_all(struct eval_bed *b, const struct eval_columns *columns, const int32_t *ids,
                     int n, struct eval_loss *item, struct err *e) {
    float nll[EVAL_FOLLOWING];
    int32_t best[EVAL_FOLLOWING], dense[EVAL_FOLLOWING];
    int rc = 0;
    for (int i = 0; i < n; i++) item->n_part[i * EVAL_PARTS / n]++;
    for (int c = 0; c < columns->n && !rc; c++) {
        int same = c == 0 ? -1 : b->is_dense[c] ? 0 : same_list(b, c);
        if (same >= 0) {
            memcpy(item->nll[c], item->nll[same], sizeof item->nll[same]);
            item->n_agree[c] = item->n_agree[same];
            continue;
        }
        rc = target_trace_rewind(b->trace, b->scores.n_tokens, e);
        if (!rc)
            rc =
                target_trace_force(b->trace, ids, n, eval_bed_kept(b, c), nll, c ? best : dense, e);
        for (int i = 0; i < n && !rc; i++) {
            item->nll[c][i * EVAL_PARTS / n] += (double)nll[i];
            item->n_agree[c] += c == 0 || best[i] == dense[i];
        }
    }
    return rc;
}

static int read_one(struct eval_bed *b, const struct eval_columns *columns,
                    const struct eval_texts *texts, const struct eval_read_options *o, int i,
                    struct eval_loss *item, struct eval_attention *attention, struct err *e) {
    int j = i / o->n_lengths, n_look = TARGET_TRACE_LOOK;
    int n = o->length[i % o->n_lengths], bos = tokenizer_adds_bos(b->tokenizer);
    const struct eval_text *v = &texts->at[j % texts->n];
    int first = eval_text_place(v, n + o->n_following, o->seed, (uint32_t)j);
    const int32_t *ids = v->ids.ids + first, *following = ids + n - bos;
    struct target_masses m;
    struct view view;
    int32_t *prompt = malloc(sizeof *prompt * (size_t)n);
    if (!prompt) return err_raise(e, E_NOMEM, "no memory for a prompt of %d tokens", n);
    if (bos) prompt[0] = tokenizer_bos(b->tokenizer);
    memcpy(prompt + bos, ids, sizeof *prompt * (size_t)(n - bos));
    *item = (struct eval_loss){
        .length = i % o->n_lengths, .text = j % texts->n, .n_blocks = target_n_blocks(n)};
    int rc = eval_bed_prompt(b, columns, prompt, n, o->seed + (uint64_t)j, e);
    free(prompt);
    bool quarters = b->apart.n_blocks > 0;
    int n_deep = b->c.n_layers - b->select_layer;
    if (!rc) rc = view_open(&view, target_n_blocks(n), n_deep, b->c.n_kv_heads, quarters, e);
    if (rc) return rc;
    if (quarters) rc = read_quarters(b, &view, following, n_look, e);
    if (!rc) rc = eval_bed_look(b, NULL, 0, following, n_look, &m, e);
    if (!rc) read_masses(&view, &m);
    if (!rc) add_attention(attention, &view, &m, quarters, TARGET_WINDOW_BLOCKS);
    if (!rc) rc = eval_bed_select(b, columns, e);
    if (!rc) judge_lists(b, columns, &view, item);
    view_close(&view);
    return rc ? rc : force_all(b, columns, following, o->n_following, item, e);
}

/* As many blocks as the first column that leaves some out keeps beside the pinned ones. */
static int best_of(const struct eval_columns *columns, int n_tokens) {
    for (int c = 1; c < columns->n; c++) {
        const struct target_settings *s = &columns->at[c].settings;
        int n = target_n_kept(s, n_tokens),
            pinned = pinned_of(target_n_blocks(n_tokens), s->window_blocks);
        if (n < target_n_blocks(n_tokens) && n > pinned) return n - pinned;
    }
    return (target_n_blocks(n_tokens) + 9) / 10;
}

int eval_read(struct eval_bed *b, const struct eval_columns *columns,
              const struct eval_texts *texts, const struct eval_read_options *o,
              const struct eval_clock *clock, struct eval_loss *items, int *n_items,
              struct eval_attention attention[EVAL_MAX_LENGTHS], struct err *e) {
    struct log_progress bar;
    struct eval_progress progress;
    int n = o->n * o->n_lengths, rc = 0;
    ASSERT(o->n_following >= TARGET_TRACE_LOOK && o->n_following <= EVAL_FOLLOWING);
    *n_items = 0;
    for (int l = 0; l < o->n_lengths; l++)
        attention[l] = (struct eval_attention){.n_best = best_of(columns, o->length[l])};
    eval_progress_start(&progress, &bar, "texts", n);
    for (int i = 0; i < n && !rc && !eval_clock_is_up(clock); i++) {
        rc = read_one(b, columns, texts, o, i, &items[i], &attention[i % o->n_lengths], e);
        if (!rc) eval_progress_at(&progress, ++*n_items);
    }
    eval_progress_end(&progress);
    return rc;
}
