#ifndef TANDEM_SERVE_SCAN_H
#define TANDEM_SERVE_SCAN_H

/* Finds where one MessagePack message ends, and refuses what the server would not want to hold. It
 * looks at each byte once, in any cutting of the stream, and allocates nothing; only a message that
 * it passed is given to msgpack-c, whose own limits (memory taken from a header's count alone) are
 * too late.
 *
 * One sum bounds everything: bytes seen + bytes that the headers seen so far still owe (an element
 * owes at least one byte, a string its length) never exceeds max_bytes. So a five-byte array32
 * header or a str32 of 4 GiB is refused when its last length byte arrives, before anything is kept
 * for it. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    SCAN_MAX_DEPTH = 16, /* arrays and maps inside each other */
    SCAN_MAX_MAP = 64,   /* entries of one map */
    SCAN_MAX_KEYS = 256, /* keys of all maps that are open at one point */
};

struct scan_limits {
    size_t max_bytes; /* of one message */
    size_t max_nodes; /* values in one message: msgpack-c takes 24 bytes for each */
};

/* What was wrong. The order is no protocol. */
#define SCAN_ERRORS(X)                                                                             \
    X(TOO_BIG, "message declares more bytes than allowed")                                         \
    X(TOO_DEEP, "nested too deep")                                                                 \
    X(TOO_MANY, "too many values")                                                                 \
    X(MAP_SIZE, "map with too many entries")                                                       \
    X(KEY_TYPE, "map key that is no string")                                                       \
    X(KEY_TWICE, "map key given twice")                                                            \
    X(EXTENSION, "extension types are not spoken here")                                            \
    X(RESERVED, "byte 0xc1 is no MessagePack")                                                     \
    X(UTF8, "str is not valid UTF-8")                                                              \
    X(NOT_FINITE, "float is NaN or infinite")

enum scan_error {
    SCAN_OK = 0,
#define SCAN_ENUM(name, text) SCAN_##name,
    SCAN_ERRORS(SCAN_ENUM)
#undef SCAN_ENUM
};
const char *scan_error_text(enum scan_error e);

enum scan_result { SCAN_NEED_MORE, SCAN_MESSAGE, SCAN_REFUSED };

/* State between bytes; the fields are internal, but for `error` and `n_bytes`. */
struct scan {
    struct scan_limits limits;
    enum scan_error error;
    size_t n_bytes; /* of the present message so far */
    size_t owed;    /* bytes that must still come, at least */
    size_t n_nodes;

    int phase;         /* enum scan_phase in scan.c */
    uint8_t head;      /* type byte of the value in hand */
    int n_length_left; /* bytes of a length or number still to come */
    uint64_t number;   /* those bytes, big-endian */
    size_t body_left;  /* of a str or bin */

    int utf8_left;               /* continuation bytes due */
    uint8_t utf8_low, utf8_high; /* range of the next one */

    uint64_t hash; /* of the key in hand */
    int n_keys;
    uint64_t key[SCAN_MAX_KEYS];

    int depth;
    struct scan_frame {
        size_t left;   /* values still to come in it */
        int first_key; /* index into key[]; -1: an array */
        bool key_next;
    } frame[SCAN_MAX_DEPTH];
};

void scan_init(struct scan *s, const struct scan_limits *limits);

/* Look at bytes[0..n). SCAN_MESSAGE: the message ended after *used bytes of these, the rest belongs
 * to the next one and the scanner stands ready for it (n_bytes keeps the length of the message
 * until the next call). SCAN_NEED_MORE: all n were used. SCAN_REFUSED: s->error says why; there is
 * no point to resume from, and every later call says the same. */
enum scan_result scan_feed(struct scan *s, const uint8_t *bytes, size_t n, size_t *used);

#endif
