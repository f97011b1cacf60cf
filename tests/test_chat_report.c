/* cmd/: what `tandem chat` says of a server. Goal: the lines tell what was told, and a server that
 * lies, in numbers or with control characters in its words, neither commands a terminal nor writes
 * lines of its own. Method: results as a server packs them, and ends of answers. */
#include "tests/harness.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "cmd/chat_report.h"
#include "serve/rpc.h"

#define HOSTILE                                                                                    \
    "a\033[2Jb\a\r\nc\xc2\x9b"                                                                     \
    "d\x7f"
#define HARMLESS "a[2Jb cd"

static void pack_int(msgpack_packer *pk, const char *name, int64_t n) {
    rpc_pack_str(pk, name);
    msgpack_pack_int64(pk, n);
}

static void pack_text(msgpack_packer *pk, const char *name, const char *text) {
    rpc_pack_str(pk, name);
    rpc_pack_text(pk, text, strlen(text));
}

/* What `pack` packed, as a client has it; its words lie in `bytes`. */
static struct strbuf bytes;
static msgpack_object unpack(msgpack_zone *zone, void (*pack)(msgpack_packer *pk)) {
    struct err e = {0};
    msgpack_object o;
    msgpack_packer pk;
    strbuf_clear(&bytes);
    rpc_packer(&pk, &bytes);
    pack(&pk);
    assert_true(msgpack_zone_init(zone, 512));
    assert_ok(rpc_unpack(zone, &o, bytes.data, bytes.n, &e), e);
    return o;
}

static int n_lines(const struct strbuf *text) {
    int n = 0;
    for (size_t i = 0; i < text->n; i++) {
        unsigned char c = (unsigned char)text->data[i];
        n += c == '\n';
        assert_true(c == '\n' || (c >= 0x20 && c != 0x7f));
        assert_false(c == 0xc2 && (unsigned char)text->data[i + 1] < 0xa0);
    }
    return n;
}

static void contains(const struct strbuf *text, const char *part) {
    if (!strstr(text->n ? text->data : "", part))
        fail_msg("\"%s\" is not in \"%s\"", part, text->n ? text->data : "");
}

static void hello(msgpack_packer *pk) {
    msgpack_pack_map(pk, 1);
    rpc_pack_str(pk, "model");
    msgpack_pack_map(pk, 2);
    pack_text(pk, "name", HOSTILE);
    pack_int(pk, "context", 4096);
}

static void nonsense(msgpack_packer *pk) {
    msgpack_pack_map(pk, 3);
    pack_int(pk, "model", 7);
    pack_text(pk, "pool", "none");
    pack_int(pk, "running", -3);
}

static void test_report_greeting(void) {
    struct strbuf text = {0};
    msgpack_zone zone;
    msgpack_object o = unpack(&zone, hello);
    chat_report_greeting(&text, &o);
    contains(&text, HARMLESS ", context 4096. /help");
    assert_int_equal(n_lines(&text), 1);
    msgpack_zone_destroy(&zone);
    strbuf_clear(&text);
    o = unpack(&zone, nonsense);
    chat_report_greeting(&text, &o);
    contains(&text, "?, context 0. /help");
    msgpack_zone_destroy(&zone);
    strbuf_clear(&text);
    chat_report_greeting(&text, NULL);
    contains(&text, "?, context 0. /help");
    strbuf_deinit(&text);
    strbuf_deinit(&bytes);
}

static void stats(msgpack_packer *pk) {
    msgpack_pack_map(pk, 4);
    pack_int(pk, "running", 2);
    pack_int(pk, "generated_tokens", INT64_MAX);
    rpc_pack_str(pk, "speculation");
    msgpack_pack_map(pk, 2);
    pack_int(pk, "rounds", 5);
    pack_text(pk, "no_draft", HOSTILE);
    rpc_pack_str(pk, "pool");
    msgpack_pack_map(pk, 2);
    pack_int(pk, "arena_bytes", 1 << 20);
    rpc_pack_str(pk, "classes");
    msgpack_pack_map(pk, 2);
    rpc_pack_str(pk, "deep");
    msgpack_pack_map(pk, 2);
    pack_int(pk, "page_bytes", 2048);
    pack_int(pk, "used", 3);
    rpc_pack_text(pk, HOSTILE, sizeof HOSTILE - 1);
    msgpack_pack_nil(pk);
}

static void test_report_stats(void) {
    struct strbuf text = {0};
    msgpack_zone zone;
    msgpack_object o = unpack(&zone, stats);
    chat_report_stats(&text, &o);
    contains(&text, "running 2, waiting 0, paused 0, connections 0\n");
    contains(&text, "generated 9223372036854775807\n");
    contains(&text, "speculation: 5 rounds");
    contains(&text, "resident 0 B, pool 1.00 MiB\n");
    contains(&text, "  deep     pages of 2.00 KiB: 3 used, 0 cached, 0 free\n");
    contains(&text, "  " HARMLESS);
    assert_int_equal(n_lines(&text), 6);
    msgpack_zone_destroy(&zone);
    strbuf_clear(&text);
    o = unpack(&zone, nonsense);
    chat_report_stats(&text, &o);
    contains(&text, "running 0, waiting 0");
    assert_int_equal(n_lines(&text), 4);
    msgpack_zone_destroy(&zone);
    strbuf_deinit(&text);
    strbuf_deinit(&bytes);
}

/* An answer's end as far as a line shows it. */
static void test_report_done(void) {
    struct client_done d = {.finish_reason = "length",
                            .prompt_tokens = 900,
                            .cached_tokens = 64,
                            .completion_tokens = 20,
                            .tokens_per_second = 12.5,
                            .ttft_ms = 40,
                            .speculation = {.rounds = 4, .drafted = 8, .accepted = 6},
                            .sparsity = {.selector = "mean",
                                         .selections = 3,
                                         .blocks = 15,
                                         .kept = 5,
                                         .first_kept = 4,
                                         .n_lists = 1,
                                         .dropped = 2,
                                         .kv_shallow_bytes = 1 << 20,
                                         .kv_deep_bytes = 1 << 20,
                                         .kv_dense_bytes = 1 << 22}};
    struct strbuf text = {0};
    chat_report_done(&text, &d);
    contains(&text, "20 tokens, 12.5 tokens/s, first after 40 ms, prompt 900 tokens (64 cached)");
    contains(&text, "5 of 15 blocks read (mean)");
    contains(&text, ", ended by: length");
    strbuf_clear(&text);
    chat_report_speculation(&text, &d);
    contains(&text, "6 of 8 draft tokens accepted");
    strbuf_clear(&text);
    chat_report_sparsity(&text, &d);
    contains(&text, "selected 3 times");
    contains(&text, "; dropped 2 blocks");
    contains(&text, "50 % of dense's 4.00 MiB");
    strbuf_clear(&text);
    /* Of a server that lies. */
    snprintf(d.finish_reason, sizeof d.finish_reason, "%s", HOSTILE);
    snprintf(d.speculation.no_draft, sizeof d.speculation.no_draft, "%s", HOSTILE);
    snprintf(d.sparsity.selector, sizeof d.sparsity.selector, "%s", HOSTILE);
    d.speculation.n_places = 1000;
    d.speculation.draft_ms = -1e300;
    d.speculation.rounds = d.speculation.accepted = d.sparsity.kept = INT64_MAX;
    d.sparsity.kv_deep_bytes = d.sparsity.exact_passes = INT64_MAX;
    chat_report_done(&text, &d);
    chat_report_speculation(&text, &d);
    chat_report_sparsity(&text, &d);
    n_lines(&text);
    contains(&text, "a[2Jb");
    strbuf_deinit(&text);
}

const struct test tests[] = {
    {"report_greeting", TEST_QUICK, 2000, test_report_greeting},
    {"report_stats", TEST_QUICK, 2000, test_report_stats},
    {"report_done", TEST_QUICK, 2000, test_report_done},
    {0},
};
