#include "kernels/cpu/formats.h"

#include "base/err.h"

const struct cpu_format cpu_formats[KERN_N_DTYPES] = {
    [KERN_F32] = {.block = 1, .element = 4},
    [KERN_F16] = {.block = 1, .element = 2},
    [KERN_BF16] = {.block = 1, .element = 2},
    [KERN_Q8_0] = {.block = 32, .low = 8, .scales = 2},
    [KERN_Q4_0] = {.block = 32, .low = 4, .scales = 2, .offset = 8},
    [KERN_Q4_1] = {.block = 32, .low = 4, .scales = 4, .min = 1},
    [KERN_Q5_0] = {.block = 32, .low = 4, .high = 1, .scales = 2, .offset = 16},
    [KERN_Q5_1] = {.block = 32, .low = 4, .high = 1, .scales = 4, .min = 1},
    [KERN_Q4_K] = {.block = 256, .low = 4, .scales = 20, .min = 1},
    [KERN_Q5_K] = {.block = 256, .low = 4, .high = 1, .scales = 20, .min = 1},
    [KERN_Q6_K] = {.block = 256, .low = 4, .high = 2, .scales = 18, .offset = 32},
};

size_t cpu_format_weight_bytes(enum kern_dtype t, int rows, int cols, int P) {
    return ceil_div((size_t)rows, (size_t)P) * cpu_panel_bytes(t, cols, P);
}

/* ---- From a file's block to stored values and scales ---------------------------------------- */

/* A file's block in plain form: up to 256 values as stored, and the record of scales of one row. */
struct raw {
    uint8_t value[256]; /* Q8_0: as int8 */
    uint8_t d[4];       /* f16 d, then m or dmin */
    uint8_t sc[16], mn[8];
};

static void raw_q45(const uint8_t *q, const uint8_t *high, uint8_t *value) {
    for (int k = 0; k < 32; k++) {
        int v = k < 16 ? q[k] & 15 : q[k - 16] >> 4;
        if (high) v |= (high[k / 8] >> k % 8 & 1) << 4;
        value[k] = (uint8_t)v;
    }
}

static void raw_k_scales(const uint8_t *p, struct raw *r) {
    for (int j = 0; j < 4; j++) {
        r->sc[j] = p[j] & 63;
        r->mn[j] = p[j + 4] & 63;
        r->sc[j + 4] = (uint8_t)((p[j + 8] & 15) | p[j] >> 6 << 4);
        r->mn[j + 4] = (uint8_t)(p[j + 8] >> 4 | p[j + 4] >> 6 << 4);
    }
}

static void raw_q45_k(const uint8_t *q, const uint8_t *high, uint8_t *value) {
    for (int k = 0; k < 256; k++) {
        int j = k / 32, byte = q[j / 2 * 32 + k % 32];
        int v = j & 1 ? byte >> 4 : byte & 15;
        if (high) v |= (high[k % 32] >> j & 1) << 4;
        value[k] = (uint8_t)v;
    }
}

static void raw_q6_k(const uint8_t *p, struct raw *r) {
    for (int k = 0; k < 256; k++) {
        int half = k / 128, quarter = k % 128 / 32, low = p[64 * half + k % 64];
        int v = quarter < 2 ? low & 15 : low >> 4;
        r->value[k] = (uint8_t)(v | (p[128 + 32 * half + k % 32] >> 2 * quarter & 3) << 4);
    }
    memcpy(r->sc, p + 192, 16);
    memcpy(r->d, p + 208, 2);
}

static void raw_load(enum kern_dtype t, const uint8_t *p, struct raw *r) {
    memcpy(r->d, p, 4);
    switch (t) {
    case KERN_Q8_0:
        memcpy(r->value, p + 2, 32);
        return;
    case KERN_Q4_0:
        raw_q45(p + 2, NULL, r->value);
        return;
    case KERN_Q4_1:
        raw_q45(p + 4, NULL, r->value);
        return;
    case KERN_Q5_0:
        raw_q45(p + 6, p + 2, r->value);
        return;
    case KERN_Q5_1:
        raw_q45(p + 8, p + 4, r->value);
        return;
    case KERN_Q4_K:
        raw_k_scales(p + 4, r);
        raw_q45_k(p + 16, NULL, r->value);
        return;
    case KERN_Q5_K:
        raw_k_scales(p + 4, r);
        raw_q45_k(p + 48, p + 16, r->value);
        return;
    case KERN_Q6_K:
        raw_q6_k(p, r);
        return;
    default:
        ASSERT(!"a quantised type");
    }
}

/* ---- Into a panel --------------------------------------------------------------------------- */

/* Values of one block of 32 of row `lane` into the block's vectors: a group of four is one word of
 * each vector, so all four bytes move at once (which end comes first does not matter to them). */
static void put_values(const struct cpu_format *f, int P, int lane, const uint8_t *value,
                       uint8_t *block) {
    uint32_t v[8], word;
    size_t vec = (size_t)P * 4;
    uint8_t *at = block + lane * 4;
    memcpy(v, value, 32);
    if (f->low == 8) {
        for (int g = 0; g < 8; g++) memcpy(at + (size_t)g * vec, &v[g], 4);
        return;
    }
    for (int g = 0; g < 4; g++) {
        word = (v[g] & 0x0f0f0f0f) | (v[g + 4] & 0x0f0f0f0f) << 4;
        memcpy(at + (size_t)g * vec, &word, 4);
    }
    if (f->high == 1) {
        word = 0;
        for (int g = 0; g < 8; g++) word |= (v[g] >> 4 & 0x01010101) << g;
        memcpy(at + 4 * vec, &word, 4);
    }
    for (int j = 0; f->high == 2 && j < 2; j++) {
        word = 0;
        for (int t = 0; t < 4; t++) word |= (v[4 * j + t] >> 4 & 0x03030303) << 2 * t;
        memcpy(at + (size_t)(4 + j) * vec, &word, 4);
    }
}

static void put_scales(const struct cpu_format *f, int P, int lane, const struct raw *r,
                       uint8_t *record) {
    size_t p = (size_t)P, at = (size_t)lane;
    memcpy(record + at * 2, r->d, 2);
    uint8_t *rest = record + p * 2;
    if (f->min) {
        memcpy(rest + at * 2, r->d + 2, 2);
        rest += p * 2;
    }
    if (f->block == 256) {
        int n_scales = f->min ? 8 : 16;
        for (int j = 0; j < n_scales; j++) rest[(size_t)j * p + at] = r->sc[j];
        if (f->min)
            for (int j = 0; j < 8; j++) rest[(size_t)(8 + j) * p + at] = r->mn[j];
    }
}

static void put_floats(int element, int P, int lane, int cols, const uint8_t *row, uint8_t *panel) {
    size_t p = (size_t)P, at = (size_t)lane;
    if (element == 4)
        for (size_t k = 0; k < (size_t)cols; k++) memcpy(panel + (k * p + at) * 4, row + k * 4, 4);
    else
        for (size_t k = 0; k < (size_t)cols; k++) memcpy(panel + (k * p + at) * 2, row + k * 2, 2);
}

static void pack_panel(const struct kern_weight *w, uint8_t *panel, const uint8_t *src, int P,
                       int first) {
    const struct cpu_format *f = &cpu_formats[w->dtype];
    int cols = w->cols, rows = w->rows - first < P ? w->rows - first : P;
    size_t row_bytes = kern_dtype_bytes(w->dtype, (size_t)cols);
    size_t file_block = kern_dtype_block_bytes(w->dtype);
    size_t block_bytes = cpu_block_bytes(w->dtype, P), record = cpu_record_bytes(w->dtype, P);
    uint8_t *scales = panel + cpu_panel_scales(w->dtype, cols, P);
    memset(panel, 0, cpu_panel_bytes(w->dtype, cols, P));
    for (int lane = 0; lane < rows; lane++) {
        const uint8_t *row = src + (size_t)(first + lane) * row_bytes;
        if (f->block == 1) {
            put_floats(f->element, P, lane, cols, row, panel);
            continue;
        }
        for (int b = 0; b < cols / f->block; b++) {
            struct raw r;
            raw_load(w->dtype, row + (size_t)b * file_block, &r);
            put_scales(f, P, lane, &r, scales + (size_t)b * record);
            for (int k = 0; k < f->block; k += 32)
                put_values(f, P, lane, r.value + k,
                           panel + (size_t)(b * f->block + k) / 32 * block_bytes);
        }
    }
}

void cpu_format_pack(const struct kern_weight *w, void *dst, const void *src, int P, int begin,
                     int end) {
    size_t bytes = cpu_panel_bytes(w->dtype, w->cols, P);
    for (int i = begin; i < end; i++)
        pack_panel(w, (uint8_t *)dst + (size_t)i * bytes, src, P, i * P);
}

/* ---- Out of a panel ------------------------------------------------------------------------- */

static int get_value(const struct cpu_format *f, size_t vec, const uint8_t *block, int lane,
                     int k) {
    int g = k / 4;
    const uint8_t *at = block + lane * 4 + k % 4;
    if (f->low == 8) return (int8_t)at[(size_t)g * vec];
    int v = at[(size_t)(g % 4) * vec] >> (g < 4 ? 0 : 4) & 15;
    if (f->high == 1) v |= (at[4 * vec] >> g & 1) << 4;
    if (f->high == 2) v |= (at[(size_t)(4 + g / 4) * vec] >> 2 * (g % 4) & 3) << 4;
    return v;
}

static float get_f16(const uint8_t *p) {
    uint16_t h;
    memcpy(&h, p, 2);
    return f16_to_f32(h);
}

/* The law's dw of both halves and mw of a row, for block number b. */
static void get_scales(const struct cpu_format *f, int P, const uint8_t *scales, int b, int lane,
                       float dw[2], float *mw) {
    int j = b % (f->block / 32);
    const uint8_t *record = scales + (size_t)(b / (f->block / 32)) * (size_t)(f->scales * P);
    const uint8_t *sc = record + 2 * P;
    float d = get_f16(record + 2 * lane);
    dw[0] = dw[1] = d;
    *mw = 0;
    if (f->min) {
        *mw = get_f16(sc + 2 * lane);
        sc += 2 * P;
    }
    if (f->block != 256) return;
    if (f->min) {
        dw[0] = dw[1] = d * (float)sc[j * P + lane];
        *mw = -(*mw * (float)sc[(8 + j) * P + lane]);
    } else {
        dw[0] = d * (float)(int8_t)sc[2 * j * P + lane];
        dw[1] = d * (float)(int8_t)sc[(2 * j + 1) * P + lane];
    }
}

void cpu_format_block(enum kern_dtype t, int cols, int P, const void *panel, int block,
                      struct cpu_block *out) {
    const struct cpu_format *f = &cpu_formats[t];
    const uint8_t *p = panel, *values = p + (size_t)block * cpu_block_bytes(t, P);
    for (int lane = 0; lane < P; lane++) {
        float dw[2];
        get_scales(f, P, p + cpu_panel_scales(t, cols, P), block, lane, dw, &out->mw[lane]);
        out->dw[0][lane] = dw[0];
        out->dw[1][lane] = dw[1];
        for (int k = 0; k < 32; k++)
            out->value[lane][k] = (int16_t)get_value(f, (size_t)P * 4, values, lane, k);
    }
}

void cpu_format_row(const struct kern_weight *w, int P, int row, float *out) {
    const struct cpu_format *f = &cpu_formats[w->dtype];
    const uint8_t *panel =
        (const uint8_t *)w->data + (size_t)(row / P) * cpu_panel_bytes(w->dtype, w->cols, P);
    int lane = row % P;
    if (f->block == 1) {
        size_t e = (size_t)f->element;
        for (int k = 0; k < w->cols; k++)
            kern_dequantize(w->dtype, panel + ((size_t)k * (size_t)P + (size_t)lane) * e, out + k,
                            1);
        return;
    }
    const uint8_t *scales = panel + cpu_panel_scales(w->dtype, w->cols, P);
    for (int b = 0; b < w->cols / 32; b++) {
        const uint8_t *block = panel + (size_t)b * cpu_block_bytes(w->dtype, P);
        float dw[2], mw;
        get_scales(f, P, scales, b, lane, dw, &mw);
        for (int k = 0; k < 32; k++) {
            int v = get_value(f, (size_t)P * 4, block, lane, k) - f->offset;
            out[b * 32 + k] = dw[k / 16] * (float)v + mw;
        }
    }
}
