#include "cmd/eval_stats.h"

#include <ctype.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define Z95 1.959963984540054

static void interval_of_share(struct eval_paired *p) {
    double n = p->n, z2 = Z95 * Z95;
    double middle = (p->mean + z2 / (2 * n)) / (1 + z2 / n);
    double half = Z95 / (1 + z2 / n) * sqrt(p->mean * (1 - p->mean) / n + z2 / (4 * n * n));
    p->lo = fmax(middle - half, 0);
    p->hi = fmin(middle + half, 1);
}

/* Half a pair is added to each of the four cells of the table. */
static void interval_of_pairs(struct eval_paired *p) {
    double n = p->n + 2.0, b = p->n_better + 0.5, c = p->n_worse + 0.5;
    double diff = (b - c) / n, half = Z95 * sqrt(b + c - (b - c) * (b - c) / n) / n;
    p->diff_lo = fmax(diff - half, -1);
    p->diff_hi = fmin(diff + half, 1);
}

struct eval_paired eval_pair(const double *score, const double *dense, size_t n, bool binary) {
    struct eval_paired p = {.n = (int)n};
    double squares = 0, diff_squares = 0;
    if (n == 0) return p;
    for (size_t i = 0; i < n; i++) {
        p.mean += score[i] / (double)n;
        p.diff += (score[i] - dense[i]) / (double)n;
        p.n_better += score[i] > dense[i];
        p.n_worse += score[i] < dense[i];
    }
    for (size_t i = 0; i < n; i++) {
        squares += (score[i] - p.mean) * (score[i] - p.mean);
        diff_squares += (score[i] - dense[i] - p.diff) * (score[i] - dense[i] - p.diff);
    }
    /* One value tells nothing of its spread: NaN, whose printing says so. */
    double freedom = n > 1 ? (double)(n - 1) : NAN;
    double half = Z95 * sqrt(squares / freedom / (double)n);
    p.se = sqrt(diff_squares / freedom / (double)n);
    p.lo = p.mean - half;
    p.hi = p.mean + half;
    p.diff_lo = p.diff - Z95 * p.se;
    p.diff_hi = p.diff + Z95 * p.se;
    if (binary) {
        interval_of_share(&p);
        interval_of_pairs(&p);
    }
    return p;
}

/* ---- Words of an answer ---- */

enum { MAX_WORDS = 2048 };

/* A text cut into normalised words: hashes of lower-cased letters and digits. Bytes above 127 count
 * as letters. */
struct word_list {
    uint64_t word[MAX_WORDS];
    int n;
};

static bool is_article(const char *word, size_t n) {
    return (n == 1 && word[0] == 'a') || (n == 2 && !memcmp(word, "an", 2)) ||
           (n == 3 && !memcmp(word, "the", 3));
}

/* Punctuation inside a word vanishes ("don't" is "dont"), as the usual scripts have it. */
static void cut_words(const char *s, bool drop_articles, struct word_list *out) {
    char word[256];
    size_t n = 0;
    out->n = 0;
    for (;; s++) {
        unsigned char c = (unsigned char)*s;
        if (c && !isspace(c)) {
            if ((isalnum(c) || c > 127) && n < sizeof word) word[n++] = (char)tolower(c);
            continue;
        }
        if (n > 0 && out->n < MAX_WORDS && !(drop_articles && is_article(word, n))) {
            uint64_t h = 14695981039346656037u; /* FNV-1a */
            for (size_t i = 0; i < n; i++) h = (h ^ (unsigned char)word[i]) * 1099511628211u;
            out->word[out->n++] = h;
        }
        n = 0;
        if (!c) return;
    }
}

static double f1_of(int same, int n_answer, int n_reference) {
    if (n_answer == 0 || n_reference == 0) return n_answer == n_reference;
    return same == 0 ? 0 : 2.0 * same / (n_answer + n_reference);
}

static int by_hash(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

double eval_f1(const char *answer, const char *reference) {
    static _Thread_local struct word_list a, b;
    int same = 0;
    cut_words(answer, true, &a);
    cut_words(reference, true, &b);
    qsort(a.word, (size_t)a.n, sizeof a.word[0], by_hash);
    qsort(b.word, (size_t)b.n, sizeof b.word[0], by_hash);
    for (int i = 0, j = 0; i < a.n && j < b.n;) {
        if (a.word[i] == b.word[j]) same++, i++, j++;
        else if (a.word[i] < b.word[j]) i++;
        else j++;
    }
    return f1_of(same, a.n, b.n);
}

double eval_exact(const char *answer, const char *reference) {
    static _Thread_local struct word_list a, b;
    cut_words(answer, true, &a);
    cut_words(reference, true, &b);
    return a.n == b.n && memcmp(a.word, b.word, sizeof a.word[0] * (size_t)a.n) == 0;
}

double eval_rouge_l(const char *answer, const char *reference) {
    static _Thread_local struct word_list a, b;
    static _Thread_local int row[MAX_WORDS + 1]; /* of the usual table, j words of b */
    cut_words(answer, false, &a);
    cut_words(reference, false, &b);
    memset(row, 0, sizeof row);
    for (int i = 0; i < a.n; i++) {
        int before = 0; /* the row above, one column to the left */
        for (int j = 1; j <= b.n; j++) {
            int above = row[j];
            if (a.word[i] == b.word[j - 1]) row[j] = before + 1;
            else if (row[j - 1] > row[j]) row[j] = row[j - 1];
            before = above;
        }
    }
    return f1_of(row[b.n], a.n, b.n);
}
