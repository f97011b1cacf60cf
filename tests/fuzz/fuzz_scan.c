/* Any bytes as what a client sends. Goals: the scanner says the same of them whole, byte by byte
 * and in odd pieces; what it passes msgpack-c unpacks, to the same length, and nobody crashes on
 * it: the message's reader and the options of generate and chat are run over it. The first input
 * byte chooses the piece size. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "base/err.h"
#include "serve/serve_private.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static const struct scan_limits limits = {.max_bytes = 4096, .max_nodes = 512};

/* Scan one message in pieces; *used gets the bytes taken until it was clear. */
static enum scan_result scan_in_pieces(const uint8_t *data, size_t n, size_t piece, size_t *used,
                                       enum scan_error *error) {
    struct scan s;
    enum scan_result r = SCAN_NEED_MORE;
    scan_init(&s, &limits);
    *used = 0;
    while (*used < n && r == SCAN_NEED_MORE) {
        size_t k = n - *used < piece ? n - *used : piece, took;
        r = scan_feed(&s, data + *used, k, &took);
        if (took > k || (r == SCAN_NEED_MORE && took != k)) abort();
        *used += took;
        if (s.n_bytes + s.owed > limits.max_bytes) abort();
    }
    if (r == SCAN_MESSAGE && (s.owed != 0 || s.n_bytes != *used)) abort();
    *error = s.error;
    return r;
}

static void read_options(const msgpack_object_array *params) {
    struct request_options o;
    struct err e = {0};
    const char *bad;
    for (uint32_t i = 0; i < params->size; i++) {
        params__defaults(&o);
        if (params__read(params__generate, &o, &params->ptr[i], 1, &bad, &e) != 0 && !e.message[0])
            abort();
        if (o.verify.n_stops < 0 || o.verify.n_stops > VERIFY_MAX_STOPS) abort();
        params__defaults(&o);
        params__read(params__chat, &o, &params->ptr[i], 1, &bad, &e);
    }
}

static void use(const uint8_t *data, size_t n) {
    msgpack_zone zone;
    msgpack_object o;
    struct rpc_message m;
    struct err e = {0};
    if (!msgpack_zone_init(&zone, 512)) return;
    if (rpc_unpack(&zone, &o, data, n, &e) != 0) abort();
    if (rpc_read(&m, &o, &e) == RPC_GOOD) {
        if (m.type != RPC_RESPONSE) read_options(&m.params);
    } else if (!e.message[0]) {
        abort();
    }
    msgpack_zone_destroy(&zone);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    if (n == 0) return 0;
    size_t piece = (size_t)data[0] % 31 + 2, used[3];
    enum scan_result r[3];
    enum scan_error error[3];
    uint32_t id;
    data++, n--;
    r[0] = scan_in_pieces(data, n, n + 1, &used[0], &error[0]);
    r[1] = scan_in_pieces(data, n, 1, &used[1], &error[1]);
    r[2] = scan_in_pieces(data, n, piece, &used[2], &error[2]);
    for (int i = 1; i < 3; i++)
        if (r[i] != r[0] || used[i] != used[0] || error[i] != error[0]) abort();
    if (r[0] == SCAN_MESSAGE) use(data, used[0]);
    rpc_peek_id(data, n, &id);
    return 0;
}
