/* Any bytes as what a client sends. Goals: the scanner says the same of them whole, byte by byte
 * and in odd pieces; what it passes msgpack-c unpacks, to the same length, and nobody crashes on
 * it: the message's reader and the options of generate and chat are run over it, and lists of
 * blocks are made by what they say of sparse reading, as over the settings of four servers. The
 * first input byte chooses the piece size. */
#include <math.h>
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

/* ---- Sparse reading by whatever was asked for ---- */

enum { MOST_BLOCKS = 21 };
static const struct target_deep deep = {.first = 1, .n_layers = 3, .n_heads = 2};

/* Ascending, the first block and the newest among them. */
static void check_list(const int32_t *list, int n, int n_blocks) {
    if (n < 1 || n > n_blocks || list[0] != 0 || list[n - 1] != n_blocks - 1) abort();
    for (int i = 1; i < n; i++)
        if (list[i] <= list[i - 1]) abort();
}

static void make_list(const struct target_settings *s, int n_tokens, int epoch, bool wide) {
    int n_blocks = target_n_blocks(n_tokens);
    float score[MOST_BLOCKS], used[MOST_BLOCKS], attention[MOST_BLOCKS], scratch[MOST_BLOCKS];
    float quarter[MOST_BLOCKS * TARGET_QUARTERS];
    int32_t list[MOST_BLOCKS];
    uint8_t quarters[MOST_BLOCKS];
    for (int i = 0; i < MOST_BLOCKS; i++) {
        score[i] = i % 7 == 3 ? NAN : i % 5 == 1 ? -INFINITY : (float)(i * 13 % 8) - 2;
        used[i] = i % 3 ? (float)(i * 5 % 11) : NAN;
        attention[i] = (float)(i * 3 % 4);
        for (int q = 0; q < TARGET_QUARTERS; q++) quarter[i * TARGET_QUARTERS + q] = score[i];
    }
    struct target_view v = {.n_tokens = n_tokens,
                            .seed = 7,
                            .epoch = epoch,
                            .mass = score,
                            .score = score,
                            .wide = wide,
                            .used = epoch > 0 ? used : NULL};
    int n = target_recheck(s, &v, scratch, list);
    if (n > 0) check_list(list, n, n_blocks);
    if (n > 0) v.attention = attention;
    if (target_n_dropped(s, &v) > n_blocks) abort();
    n = target_select(s, &v, scratch, list);
    check_list(list, n, n_blocks);
    int n_read = target_select_quarters(s, n_tokens, quarter, list, n, quarters);
    if (n_read < n || n_read > TARGET_QUARTERS * n) abort();
}

static void run_epochs(const struct target_settings *s) {
    struct target_epoch epoch = {0};
    for (int i = 0; i < 100; i++) {
        bool wide;
        if (target_epoch_left(&epoch, s) < 1) abort();
        if (target_epoch_token(&epoch, s, i % 50 == 49 ? INFINITY : (float)(i % 9), &wide))
            epoch = (struct target_epoch){.wide = wide};
    }
}

static void read_sparsely(const struct target_settings *asked) {
    static const int n_tokens[] = {1, 64, 65, 700, 64 * MOST_BLOCKS};
    for (int server = 0; server < 4; server++) {
        struct target_settings base, s;
        struct err e = {0};
        target_settings_unset(&base);
        if (server > 0) base.selector = server == 3 ? TARGET_MEAN : TARGET_OBSERVED;
        if (server == 1) base.lists = TARGET_LISTS_HEAD, base.quarters = 1;
        if (server == 2) base.exact = 8, base.keep_blocks = 4;
        if (server == 3) base.reselect = 20, base.drop = .5, base.recheck = TARGET_RECHECK_BORDER;
        if (target_settings_check(&base, &e)) abort();
        s = target_settings_resolve(&base, asked, NULL);
        target_settings_law(&s);
        target_prefill_law(&s);
        if (target_lists_check(&s, &deep, &e)) continue; /* the engine refuses it */
        int n_lists = target_n_lists(&s, &deep);
        for (int part = 0; part < deep.n_layers * deep.n_heads; part++)
            if ((unsigned)target_list_of(&s, &deep, part / deep.n_heads, part % deep.n_heads) >=
                (unsigned)n_lists)
                abort();
        for (size_t i = 0; i < sizeof n_tokens / sizeof *n_tokens; i++) {
            int border = target_prefill_border(&s, n_tokens[i] - 1);
            if (border < 0 || border >= n_tokens[i]) abort();
            target_prefill_selects(&s, border);
            target_first_selector(&s, n_tokens[i]);
            for (int kind = 0; kind < 4; kind++)
                make_list(&s, n_tokens[i], kind & 1 ? n_tokens[i] : 0, kind & 2);
        }
        run_epochs(&s);
    }
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
        if (target_settings_check(&o.sparse, &e) == 0) read_sparsely(&o.sparse);
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
