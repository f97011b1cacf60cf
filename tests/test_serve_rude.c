/* serve/ under rude, slow and dead clients: frames in pieces, garbage, cancels at any moment,
 * limits, readers that stop reading, random bytes. Method: tests/test_serve.c. */
#include "tests/harness.h"

#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/rng.h"
#include "serve/rpc.h"
#include "tests/peer.h"

/* One request in pieces of one byte; then three requests in one piece. */
static void test_serve_partial_frames(void) {
    struct spawned s;
    struct peer p;
    struct strbuf out = {0};
    peer_start(&s, &p, 100, 1);
    pack_text(&out, "[0,7,'tokenize',['ab',{'add_special_tokens':false}]]");
    for (size_t i = 0; i < out.n; i++) {
        peer_send_bytes(&p, out.data + i, 1);
        if (i % 7 == 0) usleep(1000);
        if (i + 1 < out.n && i % 16 == 0) peer_expect_silence(&p, 1);
    }
    peer_expect(&p, "[1, 7, nil, {\"tokens\"=>[97, 98], \"count\"=>2}]");
    strbuf_clear(&out);
    pack_text(&out, "[0,1,'tokenize',['a']] [0,2,'tokenize',['b']] [0,3,'tokenize',['c']]");
    peer_send_bytes(&p, out.data, out.n);
    for (int i = 1; i <= 3; i++) {
        char want[80];
        snprintf(want, sizeof want, "[1, %d, nil, {\"tokens\"=>[%d], \"count\"=>1}]", i, 96 + i);
        peer_expect(&p, want);
    }
    strbuf_deinit(&out);
    peer_stop(&s, &p);
}

/* What is no message closes that connection, says so where an id is readable, and disturbs nobody
 * else. */
static void test_serve_garbage(void) {
    static const struct {
        const char *bytes;
        size_t n;
        const char *answer;
    } t[] = {
        {"GET / HTTP/1.1\r\n\r\n", 18, NULL},
        {"\xdd\xff\xff\xff\xff", 5, NULL},
        {"\xc1", 1, NULL},
        {"\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91", 18, NULL},
        {"\x94\x03\x01\xa1x\x90", 6, NULL},
        {"\x90", 1, NULL},
        {"\x93\x02\xa1x\x05", 5, NULL},
        {"\x94\x00\x09\xa1x\xc7", 6,
         "[1, 9, [1, \"extension types are not spoken here\", {\"name\"=>\"parse_error\"}], nil]"},
        {"\x94\x00\xcd\x01\x00\xa1\xff", 7,
         "[1, 256, [1, \"str is not valid UTF-8\", {\"name\"=>\"parse_error\"}], nil]"},
        {"\x94\x00\x05\xa1x\x91\xdb\xff\xff\xff\xff", 11, "[1, 5, [1, %], nil]"},
    };
    struct spawned s;
    struct peer p, other;
    peer_start(&s, &other, 1000, 1);
    peer_send(&other, "[0,1,'generate',['abc',{'max_tokens':600}]]");
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        peer_open(&p, &s);
        peer_send_bytes(&p, t[i].bytes, t[i].n);
        if (t[i].answer) peer_expect(&p, t[i].answer);
        peer_expect_closed(&p, 2000);
        peer_close(&p);
    }
    struct strbuf text = {0};
    msgpack_object done;
    int n;
    peer_expect(&other, "[1, 1, nil, {\"stream\"=>1}]");
    peer_collect(&other, 1, &text, &n, &done);
    assert_int_equal(text.n, 600);
    strbuf_deinit(&text);
    assert_int_equal(peer_stat(&other, "bad_frames"), 10);
    /* responses and notifications are never answered, and do no harm */
    peer_send(&other, "[1,5,nil,'x'] [2,'token',[1]] [2,'generate',['x']] [1,0,[1,'e',{}],nil]");
    peer_expect_silence(&other, 100);
    peer_stop(&s, &other);
}

/* After the answer to cancel no token comes, done does, once; then the id is unknown. Many times,
 * since the two sides race. */
static void test_serve_cancel(void) {
    struct spawned s;
    struct peer p;
    msgpack_object o;
    peer_start(&s, &p, 300, 1);
    for (int i = 1; i <= 40; i++) {
        peer_send(&p, "[0,1,'generate',['abc',{'max_tokens':4000}]]");
        assert_true(peer_recv(&p, &o));
        if (i % 4) usleep((useconds_t)(i * 100));
        peer_send(&p, "[0,2,'cancel',[%d]]", i);
        bool answered = false;
        for (;;) {
            assert_true(peer_recv(&p, &o));
            if (strstr(p.text, "\"token\"")) {
                if (answered) fail_msg("token after the answer: %s", p.text);
            } else if (strstr(p.text, "\"done\"")) {
                assert_true(answered);
                assert_non_null(strstr(p.text, "\"finish_reason\"=>\"cancelled\""));
                break;
            } else {
                assert_string_equal(p.text, "[1, 2, nil, {\"cancelled\"=>true}]");
                answered = true;
            }
        }
    }
    peer_expect_silence(&p, 30);
    peer_send(&p, "[0,3,'cancel',[40]]");
    peer_expect(&p, "[1, 3, nil, {\"cancelled\"=>false}]");
    /* a unary request is cancelled by its message id */
    peer_send(&p, "[0,50,'generate',['abc',{'stream':false}]] [0,51,'cancel',[50]] "
                  "[0,52,'cancel',[50,{'unary':true}]]");
    peer_expect(&p, "[1, 51, nil, {\"cancelled\"=>false}]");
    peer_expect(&p, "[1, 52, nil, {\"cancelled\"=>true}]");
    peer_expect(&p, "[1, 50, [7, \"cancelled after % tokens\", {\"name\"=>\"cancelled\"}], nil]");
    assert_int_equal(peer_stat(&p, "running"), 0);
    peer_stop(&s, &p);
}

/* The answer is complete, but nothing of it was shown, when the cancel is read: what is dropped is
 * not called complete. The requests between give the engine time to end it. */
static void test_serve_cancel_at_the_end(void) {
    struct spawned s;
    struct peer p;
    msgpack_object o;
    struct strbuf burst = {0};
    peer_start(&s, &p, 0, 1);
    for (int i = 1; i <= 20; i++) {
        strbuf_clear(&burst);
        pack_text(&burst, "[0,1,'generate',['ab',{'max_tokens':2}]]");
        for (int k = 0; k < 40; k++) pack_text(&burst, "[0,3,'tokenize',['abc']]");
        char cancel[40];
        snprintf(cancel, sizeof cancel, "[0,2,'cancel',[%d]]", i);
        pack_text(&burst, cancel);
        peer_send_bytes(&p, burst.data, burst.n);
        bool cancelled = false;
        do {
            assert_true(peer_recv(&p, &o));
            cancelled |= strstr(p.text, "{\"cancelled\"=>true}") != NULL;
        } while (!strstr(p.text, "\"done\""));
        const char *end = cancelled ? "\"finish_reason\"=>\"cancelled\"" : "\"length\"";
        if (!strstr(p.text, end)) fail_msg("cancelled: %d, but %s", cancelled, p.text);
    }
    strbuf_deinit(&burst);
    peer_stop(&s, &p);
}

static void wait_stat(struct peer *p, const char *name, long long want) {
    int64_t start_ns = clock_ns();
    long long got;
    while ((got = peer_stat(p, name)) != want) {
        if (clock_ms_since(start_ns) > 3000) fail_msg("%s is %lld, want %lld", name, got, want);
        usleep(2000);
    }
}

/* Gone clients' requests end, streamed or unary, closed or reset. */
static void test_serve_disconnect_cancels(void) {
    struct spawned s;
    struct peer p, watcher;
    peer_start(&s, &watcher, 2000, 1);
    for (int unary = 0; unary < 2; unary++) {
        peer_open(&p, &s);
        peer_send(&p,
                  "[0,1,'generate',['abc',{'stream':%s}]] [0,2,'chat',[[{'role':'user','content':"
                  "'x'},{'role':'assistant','content':'y'}],{'add_generation_prompt':false,"
                  "'stream':%s}]]",
                  unary ? "false" : "true", unary ? "false" : "true");
        wait_stat(&watcher, "running", 2);
        peer_close(&p);
        wait_stat(&watcher, "running", 0);
        wait_stat(&watcher, "connections", 1);
    }
    peer_stop(&s, &watcher);
}

/* A client that does not read: its requests leave the batch, others go on, nothing is lost when it
 * reads again, and what piled up comes in few notifications. */
static void test_serve_slow_reader_pauses(void) {
    struct spawned s;
    struct serve_options o;
    struct peer slow, other;
    struct strbuf text = {0};
    msgpack_object done;
    int n;
    peer_options(&o);
    o.high_bytes = 4096;
    o.low_bytes = 1024;
    /* 4 s of tokens: a server that is slowed down (tsan, a busy machine) still meets the high mark
     * long before the engine has nothing left to pause */
    spawn_server(&s, &o, 1000, 1);
    peer_open(&slow, &s);
    peer_open(&other, &s);
    int small = 2048;
    setsockopt(slow.fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
    /* 64 streams of up to 4,000 tokens: more than the kernel holds for it */
    for (int i = 0; i < 60; i++)
        peer_send(&slow, "[0,%d,'generate',['abcdefgh',{'logprobs':1}]]", i);
    int64_t start_ns = clock_ns();
    while (peer_stat(&other, "paused") < 1)
        if (clock_ms_since(start_ns) > 20000) fail_msg("never paused");
    peer_send(&other, "[0,1,'generate',['xyz',{'max_tokens':100,'stream':false}]]");
    peer_expect(&other, "[1, 1, nil, {\"text\"=>\"xyzxyz%}, %}, %}]");
    long long waited = peer_stat(&other, "paused");
    usleep(50000);
    assert_true(waited > 0);
    assert_int_equal(peer_stat(&other, "paused"), waited);
    /* it wakes up: every stream is whole */
    int n_done = 0, n_answers = 0;
    size_t n_text[61] = {0};
    while (n_done < 60) {
        msgpack_object m;
        struct rpc_message r;
        struct err e = {0};
        if (!peer_recv(&slow, &m)) fail_msg("closed after %d", n_done);
        assert_int_equal(rpc_read(&r, &m, &e), RPC_GOOD);
        if (r.type == RPC_RESPONSE) {
            if (r.error.type != MSGPACK_OBJECT_NIL) fail_msg("%s", slow.text);
            n_answers++;
            continue;
        }
        uint64_t id = r.params.ptr[0].via.u64;
        assert_true(id >= 1 && id <= 60);
        if (r.method_n == 4) {
            n_done++;
            assert_int_equal(n_text[id], 4096 - 8);
            continue;
        }
        const msgpack_object *t = map_get(&r.params.ptr[1], "text");
        for (uint32_t k = 0; k < t->via.str.size; k++)
            assert_int_equal(t->via.str.ptr[k], 'a' + (int)((n_text[id] + k) % 8));
        n_text[id] += t->via.str.size;
    }
    assert_int_equal(n_answers, 60);
    assert_int_equal(peer_stat(&other, "paused"), 0);
    /* and works on */
    peer_send(&slow, "[0,1,'generate',['ab',{'max_tokens':4}]]");
    peer_expect(&slow, "[1, 1, nil, {\"stream\"=>61}]");
    peer_collect(&slow, 61, &text, &n, &done);
    assert_string_equal(text.data, "abab");
    strbuf_deinit(&text);
    peer_close(&slow);
    peer_stop(&s, &other);
}

static void test_serve_limits(void) {
    struct spawned s;
    struct serve_options o;
    struct peer p[4];
    peer_options(&o);
    o.max_connections = 3;
    o.max_streams = 2;
    o.max_message_bytes = 2048;
    spawn_server(&s, &o, 5000, 1);
    for (int i = 0; i < 3; i++) {
        peer_open(&p[i], &s);
        assert_int_equal(peer_stat(&p[i], "connections"), i + 1);
    }
    peer_open(&p[3], &s);
    peer_expect_closed(&p[3], 2000);
    peer_close(&p[3]);
    assert_int_equal(peer_stat(&p[0], "refused"), 1);
    peer_send(&p[0], "[0,1,'generate',['a']] [0,2,'generate',['a',{'stream':false}]] "
                     "[0,3,'generate',['a']]");
    peer_expect(&p[0], "[1, 1, nil, {\"stream\"=>1}]");
    for (;;) { /* among token notifications */
        msgpack_object m;
        assert_true(peer_recv(&p[0], &m));
        if (m.via.array.ptr[0].via.u64 == RPC_RESPONSE) break;
    }
    assert_string_equal(p[0].text, "[1, 3, [14, \"2 requests run on this connection, at most 2\", "
                                   "{\"name\"=>\"too_many\"}], nil]");
    peer_close(&p[0]);
    wait_stat(&p[1], "running", 0);
    /* a place is free again */
    peer_open(&p[0], &s);
    assert_int_equal(peer_stat(&p[0], "connections"), 3);
    /* a message over the limit is refused at its header */
    peer_send_bytes(&p[2], "\x94\x00\x03\xa8tokenize\x91\xc5\x08\x00", 16);
    peer_expect(&p[2], "[1, 3, [1, \"message declares more bytes than allowed\", "
                       "{\"name\"=>\"parse_error\"}], nil]");
    peer_expect_closed(&p[2], 2000);
    peer_close(&p[2]);
    peer_close(&p[1]);
    peer_stop(&s, &p[0]);
}

/* Requests with bytes changed, cut and doubled at random: whatever they have become, the server
 * lives, answers or closes, and nothing is left running. (The scanner has its own fuzz target; here
 * it is the whole path.) */
static void test_serve_random_bytes(void) {
    static const char *const seeds[] = {
        "[0,1,'generate',['hello',{'max_tokens':8,'temperature':0.5,'stop':['a','b'],'seed':7}]]",
        "[0,2,'chat',[[{'role':'user','content':'hi'}],{'stream':false,'max_tokens':3}]]",
        "[0,3,'tokenize',['abc',{'add_special_tokens':false}]] [0,4,'detokenize',[[104,105]]]",
        "[0,5,'hello',[{'protocol':1,'client':'x','token':h'ff00'}]] [0,6,'stats',[]]",
        "[0,7,'cancel',[1]] [0,8,'plan',[{'context':100}]] [0,9,'memory',[]] [1,2,nil,5]",
        "[0,10,'generate',[[1,2,3],{'logprobs':2,'min_p':0.1,'cache_salt':'s'}]] "
        "[0,11,'generate',['h\xc3\xa9',{'draft_tokens':3,'coupling':'gumbel','lookup':false,"
        "'drafted':true,'conversation':'c','sparse':'observed','keep_blocks':3}]] "
        "[0,11,'cancel',[1]]",
    };
    enum { N_SEEDS = sizeof seeds / sizeof *seeds, N_RUNS = 600 };
    struct spawned s;
    struct peer p, watcher;
    int n_answers = 0;
    peer_start(&s, &watcher, 200, 2);
    for (int run = 0; run < N_RUNS; run++) {
        struct strbuf b = {0};
        uint32_t k = 0;
#define DRAW(n) (rng_u32(11, (uint64_t)run, RNG_TEST, k++) % (uint32_t)(n))
        pack_text(&b, seeds[DRAW(N_SEEDS)]);
        for (uint32_t ops = DRAW(4); ops > 0; ops--) {
            size_t at = DRAW(b.n);
            uint32_t what = DRAW(4);
            if (what == 0) b.data[at] = (char)DRAW(256);
            else if (what == 1) b.data[at] ^= (char)(1u << DRAW(8));
            else if (what == 2 && b.n > 4) b.n = at + 1;
            else strbuf_append(&b, seeds[0], DRAW(9)); /* noise behind it */
        }
#undef DRAW
        peer_open(&p, &s);
        /* the server may close at the first bad byte, before the rest is sent */
        if (send(p.fd, b.data, b.n, MSG_NOSIGNAL) > 0) shutdown(p.fd, SHUT_WR);
        char part[4096];
        ssize_t n;
        while ((n = recv(p.fd, part, sizeof part, 0)) > 0) n_answers++;
        peer_close(&p);
        strbuf_deinit(&b);
    }
    wait_stat(&watcher, "running", 0);
    wait_stat(&watcher, "connections", 1);
    assert_true(n_answers > N_RUNS / 4);
    assert_true(peer_stat(&watcher, "bad_frames") > 20);
    peer_stop(&s, &watcher);
}

const struct test tests[] = {
    {"serve_partial_frames", TEST_QUICK, 10000, test_serve_partial_frames},
    {"serve_garbage", TEST_QUICK, 15000, test_serve_garbage},
    {"serve_cancel", TEST_QUICK, 15000, test_serve_cancel},
    {"serve_cancel_at_the_end", TEST_QUICK, 15000, test_serve_cancel_at_the_end},
    {"serve_disconnect_cancels", TEST_QUICK, 15000, test_serve_disconnect_cancels},
    {"serve_slow_reader_pauses", TEST_QUICK, 20000, test_serve_slow_reader_pauses},
    {"serve_limits", TEST_QUICK, 10000, test_serve_limits},
    {"serve_random_bytes", TEST_QUICK, 20000, test_serve_random_bytes},
    {0},
};
