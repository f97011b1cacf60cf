/* A message is a value; a value is a head byte, perhaps a length or a number in up to 8 bytes,
 * perhaps a body of bytes or of values. The stack holds open arrays and maps. */
#include "serve/scan.h"

#include <string.h>

#include "base/err.h"

enum scan_phase { PHASE_HEAD, PHASE_LENGTH, PHASE_NUMBER, PHASE_BODY, PHASE_DONE, PHASE_REFUSED };

const char *scan_error_text(enum scan_error e) {
    switch (e) {
    case SCAN_OK:
        return "ok";
#define SCAN_TEXT(name, text)                                                                      \
    case SCAN_##name:                                                                              \
        return text;
        SCAN_ERRORS(SCAN_TEXT)
#undef SCAN_TEXT
    }
    return "?";
}

static void begin_message(struct scan *s) {
    s->n_bytes = 0;
    s->owed = 1;
    s->n_nodes = 1;
    s->phase = PHASE_HEAD;
    s->depth = 0;
    s->n_keys = 0;
    s->utf8_left = 0;
}

void scan_init(struct scan *s, const struct scan_limits *limits) {
    ASSERT(limits->max_bytes > 0 && limits->max_nodes > 0);
    memset(s, 0, sizeof *s);
    s->limits = *limits;
    begin_message(s);
}

static bool refuse(struct scan *s, enum scan_error e) {
    s->error = e;
    s->phase = PHASE_REFUSED;
    return false;
}

/* Headers promise n bytes more. No overflow: n_bytes + owed <= max_bytes always holds. */
static bool owe(struct scan *s, uint64_t n) {
    if (n > s->limits.max_bytes - s->n_bytes - s->owed) return refuse(s, SCAN_TOO_BIG);
    s->owed += (size_t)n;
    return true;
}

static bool in_key(const struct scan *s) {
    return s->depth > 0 && s->frame[s->depth - 1].first_key >= 0 && s->frame[s->depth - 1].key_next;
}

/* The key in hand is complete: is it new in its map? At most SCAN_MAX_MAP comparisons. Equal hashes
 * count as equal keys: with 64 bits an honest client never sees that, and a dishonest one only
 * hurts itself. */
static bool end_key(struct scan *s) {
    struct scan_frame *f = &s->frame[s->depth - 1];
    for (int i = f->first_key; i < s->n_keys; i++)
        if (s->key[i] == s->hash) return refuse(s, SCAN_KEY_TWICE);
    ASSERT(s->n_keys < SCAN_MAX_KEYS);
    s->key[s->n_keys++] = s->hash;
    f->key_next = false;
    f->left--;
    return true;
}

/* A value ended: so may the arrays and maps around it. */
static void end_value(struct scan *s) {
    s->phase = PHASE_HEAD;
    while (s->depth > 0) {
        struct scan_frame *f = &s->frame[s->depth - 1];
        f->left--;
        if (f->left > 0) {
            f->key_next = f->first_key >= 0;
            return;
        }
        if (f->first_key >= 0) s->n_keys = f->first_key;
        s->depth--;
    }
    s->phase = PHASE_DONE;
}

static bool open_container(struct scan *s, uint64_t n, bool map) {
    if (map && n > SCAN_MAX_MAP) return refuse(s, SCAN_MAP_SIZE);
    uint64_t values = map ? 2 * n : n;
    if (!owe(s, values)) return false;
    if (values > s->limits.max_nodes - s->n_nodes) return refuse(s, SCAN_TOO_MANY);
    s->n_nodes += (size_t)values;
    if (s->depth == SCAN_MAX_DEPTH) return refuse(s, SCAN_TOO_DEEP);
    if (n == 0) {
        end_value(s);
        return true;
    }
    if (map) {
        /* Room for all its keys, on top of those that the maps around it may still bring. */
        size_t coming = n;
        for (int i = 0; i < s->depth; i++)
            if (s->frame[i].first_key >= 0) coming += s->frame[i].left / 2;
        if (coming > (size_t)(SCAN_MAX_KEYS - s->n_keys)) return refuse(s, SCAN_MAP_SIZE);
    }
    s->frame[s->depth++] = (struct scan_frame){
        .left = (size_t)values, .first_key = map ? s->n_keys : -1, .key_next = map};
    s->phase = PHASE_HEAD;
    return true;
}

static bool is_str(uint8_t head) {
    return (head & 0xe0) == 0xa0 || (head >= 0xd9 && head <= 0xdb);
}

static bool end_body(struct scan *s) {
    if (s->utf8_left) return refuse(s, SCAN_UTF8);
    if (in_key(s)) {
        s->phase = PHASE_HEAD;
        return end_key(s);
    }
    end_value(s);
    return true;
}

static bool open_body(struct scan *s, uint64_t n) {
    if (!owe(s, n)) return false;
    s->body_left = (size_t)n;
    s->hash = 0xcbf29ce484222325ull;
    s->phase = PHASE_BODY;
    return n > 0 || end_body(s);
}

/* One byte of a str: Unicode's table 3-7 of well-formed sequences as ranges of the next byte. */
static bool utf8_step(struct scan *s, uint8_t b) {
    if (s->utf8_left) {
        if (b < s->utf8_low || b > s->utf8_high) return false;
        s->utf8_left--;
        s->utf8_low = 0x80;
        s->utf8_high = 0xbf;
        return true;
    }
    if (b < 0x80) return true;
    s->utf8_low = 0x80;
    s->utf8_high = 0xbf;
    if (b >= 0xc2 && b <= 0xdf) s->utf8_left = 1;
    else if (b >= 0xe0 && b <= 0xef) {
        s->utf8_left = 2;
        if (b == 0xe0) s->utf8_low = 0xa0;
        if (b == 0xed) s->utf8_high = 0x9f;
    } else if (b >= 0xf0 && b <= 0xf4) {
        s->utf8_left = 3;
        if (b == 0xf0) s->utf8_low = 0x90;
        if (b == 0xf4) s->utf8_high = 0x8f;
    } else return false;
    return true;
}

/* As much of the body as there is in b[0..n); n > 0. */
static size_t feed_body(struct scan *s, const uint8_t *b, size_t n) {
    if (n > s->body_left) n = s->body_left;
    if (is_str(s->head)) {
        for (size_t i = 0; i < n; i++)
            if ((b[i] >= 0x80 || s->utf8_left) && !utf8_step(s, b[i])) {
                refuse(s, SCAN_UTF8);
                return i;
            }
    }
    if (in_key(s))
        for (size_t i = 0; i < n; i++) s->hash = (s->hash ^ b[i]) * 0x100000001b3ull;
    s->n_bytes += n;
    s->owed -= n;
    s->body_left -= n;
    if (s->body_left == 0) end_body(s);
    return n;
}

/* `n` bytes of a length or a number follow the head. */
static bool expect(struct scan *s, int n, enum scan_phase phase) {
    if (!owe(s, (uint64_t)n)) return false;
    s->n_length_left = n;
    s->number = 0;
    s->phase = phase;
    return true;
}

static bool take_head(struct scan *s, uint8_t b) {
    s->head = b;
    bool bytes = is_str(b) || (b >= 0xc4 && b <= 0xc6);
    if (in_key(s) && !bytes) return refuse(s, SCAN_KEY_TYPE);
    if (b <= 0x7f || b >= 0xe0 || b == 0xc0 || b == 0xc2 || b == 0xc3) {
        end_value(s);
        return true;
    }
    if (b <= 0x8f) return open_container(s, b & 0x0f, true);
    if (b <= 0x9f) return open_container(s, b & 0x0f, false);
    if (b <= 0xbf) return open_body(s, b & 0x1f);
    switch (b) {
    case 0xc1:
        return refuse(s, SCAN_RESERVED);
    case 0xc4:
    case 0xd9:
        return expect(s, 1, PHASE_LENGTH);
    case 0xc5:
    case 0xda:
    case 0xdc:
    case 0xde:
        return expect(s, 2, PHASE_LENGTH);
    case 0xc6:
    case 0xdb:
    case 0xdd:
    case 0xdf:
        return expect(s, 4, PHASE_LENGTH);
    case 0xcc:
    case 0xd0:
        return expect(s, 1, PHASE_NUMBER);
    case 0xcd:
    case 0xd1:
        return expect(s, 2, PHASE_NUMBER);
    case 0xca:
    case 0xce:
    case 0xd2:
        return expect(s, 4, PHASE_NUMBER);
    case 0xcb:
    case 0xcf:
    case 0xd3:
        return expect(s, 8, PHASE_NUMBER);
    default:
        return refuse(s, SCAN_EXTENSION); /* c7..c9, d4..d8 */
    }
}

static bool end_length(struct scan *s) {
    switch (s->head) {
    case 0xdc:
    case 0xdd:
        return open_container(s, s->number, false);
    case 0xde:
    case 0xdf:
        return open_container(s, s->number, true);
    default:
        return open_body(s, s->number);
    }
}

static bool end_number(struct scan *s) {
    bool f32 = s->head == 0xca && (s->number & 0x7f800000u) == 0x7f800000u;
    bool f64 = s->head == 0xcb && (s->number >> 52 & 0x7ff) == 0x7ff;
    if (f32 || f64) return refuse(s, SCAN_NOT_FINITE);
    end_value(s);
    return true;
}

enum scan_result scan_feed(struct scan *s, const uint8_t *bytes, size_t n, size_t *used) {
    size_t i = 0;
    if (s->phase == PHASE_DONE) begin_message(s);
    while (i < n && s->phase != PHASE_DONE && s->phase != PHASE_REFUSED) {
        if (s->phase == PHASE_BODY) {
            i += feed_body(s, bytes + i, n - i);
            continue;
        }
        uint8_t b = bytes[i++];
        s->n_bytes++;
        s->owed--;
        if (s->phase == PHASE_HEAD) {
            take_head(s, b);
            continue;
        }
        s->number = s->number << 8 | b;
        if (--s->n_length_left > 0) continue;
        if (s->phase == PHASE_LENGTH) end_length(s);
        else end_number(s);
    }
    *used = i;
    if (s->phase == PHASE_REFUSED) return SCAN_REFUSED;
    return s->phase == PHASE_DONE ? SCAN_MESSAGE : SCAN_NEED_MORE;
}
