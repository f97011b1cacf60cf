/* serve/: the server under good, rude and dead clients. Method: each test spawns a server on a fake
 * engine (tests/fake_engine.h: the answer repeats the prompt, a byte a token) and talks to it over
 * real sockets with a raw client whose messages are compared as text. The server's exit code is
 * checked at the end, so leak and race checkers speak, too. Time-outs and drains:
 * tests/test_serve_time.c. */
#include "tests/harness.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "serve/rpc.h"
#include "tests/peer.h"

static void test_serve_describes_itself(void) {
    struct spawned s;
    struct peer p;
    msgpack_object o;
    peer_start(&s, &p, 100, 1);
    peer_send(&p, "[0,1,'hello',[{'client':'test','protocol':1}]]");
    peer_expect(
        &p,
        "[1, 1, nil, {\"server\"=>\"tandem\", \"protocol\"=>1, \"model\"=>{\"name\"=>\"fake "
        "\"model\"\", \"fingerprint\"=>\"fedcba9876543210\", \"context\"=>4096, "
        "\"chat_template\"=>\"fake\", \"tokenizer\"=>{\"fingerprint\"=>\"0123456789abcdef\", "
        "\"n_tokens\"=>258}, \"draft\"=>{\"name\"=>\"fake draft\", \"architecture\"=>\"llama\", "
        "\"layers\"=>2, \"context\"=>2048}, \"speculation\"=>{\"draft_tokens\"=>\"auto\", "
        "\"max_draft_tokens\"=>8, \"lookup\"=>true, \"coupling\"=>\"lossless\"}, "
        "\"sparsity\"=>{\"selector\"=>\"off\", \"keep\"=>\"curve\", \"keep_blocks\"=>nil, "
        "\"min_blocks\"=>32, \"window_blocks\"=>3, \"reserve\"=>0.010000, "
        "\"keep_threshold\"=>nil, \"smooth\"=>0.000000, \"reselect\"=>\"off\", "
        "\"reselector\"=>\"mean\", \"surprise\"=>0.500000, \"recheck\"=>\"off\", "
        "\"drop\"=>0.000000, \"exact\"=>0, "
        "\"prefill\"=>\"dense\", \"prefill_dense\"=>2048, \"prefill_chunk\"=>512, "
        "\"lists\"=>\"one\", \"select2\"=>0, \"quarters\"=>4}}, "
        "\"limits\"=>{\"message_bytes\"=>16777216, \"depth\"=>16, "
        "\"values\"=>1048576, \"streams\"=>64, \"stop_strings\"=>16, \"logprobs\"=>20, "
        "\"draft_tokens\"=>16}}]");
    peer_send(&p, "[0,2,'hello',[{'protocol':2}]]");
    peer_expect(
        &p, "[1, 2, [11, \"protocol 2; this server speaks 1\", {\"name\"=>\"unsupported\"}], nil]");
    peer_send(&p, "[0,3,'tokenize',['h\xc3\xa9']]");
    peer_expect(&p, "[1, 3, nil, {\"tokens\"=>[104, 195, 169], \"count\"=>3}]");
    peer_send(&p, "[0,4,'detokenize',[[104,195,169,256]]]");
    peer_expect(&p, "[1, 4, nil, {\"text\"=>\"h\xc3\xa9\"}]");
    peer_send(&p, "[0,5,'detokenize',[[104,256],{'skip_special_tokens':false}]]");
    peer_expect(&p, "[1, 5, nil, {\"text\"=>\"h<eos>\"}]");
    peer_send(&p, "[0,6,'detokenize',[[195]]]");
    peer_expect(&p, "[1, 6, nil, {\"bytes\"=>%}]");
    peer_send(&p, "[0,7,'detokenize',[[258]]]");
    peer_expect(&p, "[1, 7, [4, \"token 0 is no id from 0 to 257\", {\"name\"=>\"invalid_params\", "
                    "\"param\"=>\"tokens\"}], nil]");
    peer_send(&p, "[0,8,'models',[]]");
    peer_expect(&p, "[1, 8, nil, [{\"name\"=>%}]]");
    peer_send(&p, "[0,9,'plan',[{'context':777,'free_memory':5}]]");
    assert_true(peer_recv(&p, &o));
    const msgpack_object *plan = &o.via.array.ptr[3];
    assert_int_equal(map_int(plan, "context"), 777);
    assert_int_equal(map_int(plan, "budget_bytes"), 5);
    peer_send(&p, "[0,10,'memory',[]]");
    assert_true(peer_recv(&p, &o));
    assert_int_equal(map_int(map_get(&o.via.array.ptr[3], "pool"), "arena_bytes"), 1 << 20);
    assert_int_equal(peer_stat(&p, "running"), 0);
    peer_stop(&s, &p);
}

/* The text of all notifications is the answer; seq counts; one done, with the usage. */
static void test_serve_generate_streams(void) {
    struct spawned s;
    struct peer p;
    struct strbuf text = {0};
    msgpack_object done;
    int n;
    peer_start(&s, &p, 200, 3);
    peer_send(&p, "[0,1,'generate',['hello ',{'max_tokens':20}]]");
    peer_expect(&p, "[1, 1, nil, {\"stream\"=>1}]");
    peer_collect(&p, 1, &text, &n, &done);
    assert_string_equal(text.data, "hello hello hello he");
    assert_true(n >= 1 && n <= 7);
    assert_true(rpc_text_is(map_get(&done, "finish_reason"), "length"));
    assert_int_equal(map_get(&done, "stop_reason")->type, MSGPACK_OBJECT_NIL);
    const msgpack_object *usage = map_get(&done, "usage");
    assert_int_equal(map_int(usage, "prompt_tokens"), 6);
    assert_int_equal(map_int(usage, "completion_tokens"), 20);
    assert_int_equal(map_int(usage, "total_tokens"), 26);
    assert_int_equal(map_int(&done, "seed"), 99);
    map_get(map_get(&done, "timings"), "ttft_ms");
    peer_expect_silence(&p, 50);
    strbuf_deinit(&text);
    peer_stop(&s, &p);
}

static void test_serve_unary(void) {
    struct spawned s;
    struct peer p;
    peer_start(&s, &p, 100, 2);
    peer_send(
        &p, "[0,1,'generate',['ab',{'max_tokens':5,'stream':false,'seed':18446744073709551615}]]");
    peer_expect(&p, "[1, 1, nil, {\"text\"=>\"ababa\", \"tokens\"=>[97, 98, 97, 98, 97], "
                    "\"finish_reason\"=>\"length\", \"stop_reason\"=>nil, \"usage\"=>{%}, "
                    "\"timings\"=>{%}, \"seed\"=>18446744073709551615, \"speculation\"=>{%}, "
                    "\"sparsity\"=>{\"selector\"=>\"off\"}}]");
    peer_send(&p, "[0,2,'generate',[[104,105],{'max_tokens':3.0,'stream':false,'logprobs':1}]]");
    peer_expect(&p, "[1, 2, nil, {\"text\"=>\"hih\", \"tokens\"=>[104, 105, 104], \"logprobs\"=>["
                    "{\"logprob\"=>-0.500000, \"top\"=>[[104, -0.500000]]}, "
                    "{\"logprob\"=>-0.500000, \"top\"=>[[105, -0.500000]]}, "
                    "{\"logprob\"=>-0.500000, \"top\"=>[[104, -0.500000]]}], \"finish_reason\"=>%, "
                    "\"stop_reason\"=>nil, \"usage\"=>{%}, \"timings\"=>{%}, \"seed\"=>99, "
                    "\"speculation\"=>{%}, \"sparsity\"=>{%}}]");
    peer_send(&p, "[0,3,'chat',[[{'role':'user','content':'hi!'}],{'stream':false}]]");
    peer_expect(&p, "[1, 3, nil, {\"text\"=>\"hi!\", \"tokens\"=>[104, 105, 33, 256], "
                    "\"finish_reason\"=>\"stop\", %}, %}, %}, %}]");
    peer_stop(&s, &p);
}

/* A stop string across tokens is never shown in part; an incomplete character waits; what is no
 * UTF-8 comes as bin. One token a notification at most, since the engine commits one a step and we
 * read along. */
static void test_serve_text_edges(void) {
    struct spawned s;
    struct peer p;
    struct strbuf text = {0};
    msgpack_object o, done;
    int n;
    peer_start(&s, &p, 1000, 1);
    peer_send(&p, "[0,1,'generate',['one END two',{'stop':['END','XX']}]]");
    peer_expect(&p, "[1, 1, nil, {\"stream\"=>1}]");
    peer_collect(&p, 1, &text, &n, &done);
    assert_string_equal(text.data, "one ");
    assert_true(rpc_text_is(map_get(&done, "finish_reason"), "stop"));
    assert_true(rpc_text_is(map_get(&done, "stop_reason"), "END"));
    strbuf_clear(&text);
    /* held back at the end of the stream: released, not lost */
    peer_send(&p, "[0,2,'generate',['one EN',{'stop':'END','max_tokens':6}]]");
    peer_expect(&p, "[1, 2, nil, {\"stream\"=>2}]");
    peer_collect(&p, 2, &text, &n, &done);
    assert_string_equal(text.data, "one EN");
    /* an emoji in four tokens: every notification is whole characters */
    peer_send(&p, "[0,3,'generate',['\xf0\x9f\x98\x80',{'max_tokens':8}]]");
    peer_expect(&p, "[1, 3, nil, {\"stream\"=>3}]");
    int n_chars = 0;
    for (;;) {
        assert_true(peer_recv(&p, &o));
        if (strstr(p.text, "\"done\"")) break;
        const msgpack_object *map = &o.via.array.ptr[2].via.array.ptr[1];
        const msgpack_object *t = map_get(map, "text");
        assert_int_equal(t->type, MSGPACK_OBJECT_STR);
        assert_int_equal(t->via.str.size % 4, 0);
        n_chars += (int)t->via.str.size / 4;
    }
    assert_int_equal(n_chars, 2);
    peer_send(&p, "[0,4,'generate',[[195,40],{'max_tokens':2,'stream':false}]]");
    peer_expect(&p, "[1, 4, nil, {\"bytes\"=>%, \"tokens\"=>[195, 40], %}, %}, %}]");
    strbuf_deinit(&text);
    peer_stop(&s, &p);
}

static void test_serve_bad_params(void) {
    static const struct {
        const char *request, *answer;
    } t[] = {
        {"'generate',['x',{'max_token':3}]",
         "[4, \"unknown option \"max_token\"; did you mean \"max_tokens\"?\", "
         "{\"name\"=>\"invalid_params\"}]"},
        {"'generate',['x',{'zzzz':3}]",
         "[4, \"unknown option \"zzzz\"\", {\"name\"=>\"invalid_params\"}]"},
        {"'generate',['x',{'temperature':-0.5}]",
         "[4, \"temperature is -0.5, allowed is [0, 100]\", {\"name\"=>\"invalid_params\", "
         "\"param\"=>\"temperature\"}]"},
        {"'generate',['x',{'top_p':0}]", "[4, \"top_p is 0, allowed is (0, 1]\", %]"},
        {"'generate',['x',{'top_p':1.5}]", "[4, \"top_p is 1.5, allowed is (0, 1]\", %]"},
        {"'generate',['x',{'top_k':-1}]", "[4, \"top_k is -1, allowed is [0, 2147483647]\", %]"},
        {"'generate',['x',{'top_k':2.5}]", "[4, \"top_k must be an integer, not 2.5\", %]"},
        {"'generate',['x',{'max_tokens':0}]",
         "[4, \"max_tokens is 0, allowed is [1, 2147483647]\", %]"},
        {"'generate',['x',{'max_tokens':9223372036854775808}]",
         "[4, \"max_tokens is 9.22337203685478e+18, allowed is [1, 2147483647]\", %]"},
        {"'generate',['x',{'min_tokens':5,'max_tokens':2}]", "[4, %]"},
        {"'generate',['x',{'seed':-1}]", "[4, \"seed must be an integer from 0 to 2^64 - 1\", %]"},
        {"'generate',['x',{'stream':1}]",
         "[4, \"stream must be true or false, not an integer\", %]"},
        {"'generate',['x',{'stop':'%s'}]",
         "[4, \"a stop string must have 1 to 256 bytes, not 0\", %]"},
        {"'generate',['x',{'stop':[1]}]",
         "[4, \"stop must be a str or an array of them, not an integer\", %]"},
        {"'generate',['x',{'logprobs':21}]", "[4, \"logprobs is 21, allowed is [0, 20]\", %]"},
        {"'generate',['x',{'n':2}]", "[4, \"n must be 1: one answer a request\", %]"},
        {"'generate',['x',{'stop':['1','2','3','4','5','6','7','8','9','a','b','c','d','e','f','g',"
         "'h']}]",
         "[4, \"stop holds 17 strings, at most 16\", %]"},
        {"'generate',['x',[]]", "[4, \"options must be a map, not an array\", %]"},
        {"'generate',['x',{},{}]", "[4, \"3 parameters; the form is generate [prompt, options]\", "
                                   "{\"name\"=>\"invalid_params\"}]"},
        {"'generate',[]", "[4, \"0 parameters; the form is generate [prompt, options]\", %]"},
        {"'generate',[5]",
         "[4, \"prompt must be a str or an array of token ids, not an integer\", %]"},
        {"'generate',['']", "[4, \"prompt is empty\", %]"},
        {"'generate',[[1,300]]", "[4, \"token 1 is no id from 0 to 257\", %]"},
        {"'generate',[[-1]]", "[4, \"token 0 is no id from 0 to 257\", %]"},
        {"'chat',[[]]", "[4, \"0 messages, allowed is 1 to 4096\", %]"},
        {"'chat',['hi']", "[4, \"messages must be an array, not a str\", %]"},
        {"'chat',[[{'role':'user'}]]", "[4, \"messages[0] needs role and content\", %]"},
        {"'chat',[[{'role':'user','content':5}]]",
         "[4, \"messages[0].content must be a str, not an integer\", %]"},
        {"'chat',[[{'role':'king','content':'x'}]]", "[4, \"role \"king\" has no place\", %]"},
        {"'chat',[[{'role':'user','text':'x'}]]",
         "[4, \"messages[0] has a key \"text\"; it takes role and content\", %]"},
        {"'stats',[1]", "[4, \"options must be a map, not an integer\", %]"},
        {"'generat',['x']", "[3, \"no method \"generat\"; did you mean \"generate\"?\", "
                            "{\"name\"=>\"unknown_method\"}]"},
        {"'xyzzy',[]", "[3, \"no method \"xyzzy\"\", {\"name\"=>\"unknown_method\"}]"},
        {"'cancel',['a']", "[4, %]"},
        {"5,[]", "[2, \"method must be a str, not an integer\", {\"name\"=>\"invalid_request\"}]"},
        {"'hello',{}", "[2, \"params must be an array, not a map\", %]"},
    };
    struct spawned s;
    struct peer p;
    peer_start(&s, &p, 100, 1);
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        char want[600];
        snprintf(want, sizeof want, "[1, %zu, %s, nil]", i, t[i].answer);
        struct strbuf out = {0};
        char text[600], *empty;
        snprintf(text, sizeof text, "[0,%zu,%s]", i, t[i].request);
        if ((empty = strstr(text, "%s"))) memmove(empty, empty + 2, strlen(empty + 2) + 1);
        pack_text(&out, text);
        peer_send_bytes(&p, out.data, out.n);
        peer_expect(&p, want);
        strbuf_deinit(&out);
    }
    /* nil is "not given", x_ is nobody's business */
    peer_send(&p,
              "[0,90,'generate',['x',{'max_tokens':1,'top_p':nil,'x_trace':'id','stream':false}]]");
    peer_expect(&p, "[1, 90, nil, {\"text\"=>\"x\", %}, %}, %}]");
    peer_stop(&s, &p);
}

static void send_text(struct peer *p, uint32_t id, const char *method, char fill, size_t n) {
    struct strbuf out = {0};
    msgpack_packer pk;
    char *text = malloc(n);
    memset(text, fill, n);
    rpc_packer(&pk, &out);
    rpc_pack_request_head(&pk, id, method);
    msgpack_pack_array(&pk, 1);
    rpc_pack_text(&pk, text, n);
    peer_send_bytes(p, out.data, out.n);
    free(text);
    strbuf_deinit(&out);
}

/* Refused by the engine; by the count of its tokens, on another thread; by its length alone. */
static void test_serve_too_long(void) {
    struct spawned s;
    struct peer p;
    peer_start(&s, &p, 100, 1);
    send_text(&p, 0, "generate", 'a', 5000);
    peer_expect(&p, "[1, 0, [5, \"prompt of 5000 tokens, context 4096\", {\"name\"=>\"too_long\", "
                    "\"n_prompt\"=>5000, \"n_ctx\"=>4096, \"max_tokens\"=>nil}], nil]");
    send_text(&p, 1, "generate", 'a', 20000);
    peer_expect(&p, "[1, 1, [5, \"the prompt has at least 16385 tokens, the context holds 4096\", "
                    "{\"name\"=>\"too_long\", \"n_prompt\"=>16385, \"n_ctx\"=>4096}], nil]");
    send_text(&p, 2, "generate", 'a', 1800000);
    peer_expect(&p, "[1, 2, [5, \"the prompt has at least 100000 tokens, the context holds 4096\", "
                    "{\"name\"=>\"too_long\", \"n_prompt\"=>100000, \"n_ctx\"=>4096}], nil]");
    peer_stop(&s, &p);
}

/* A long text is encoded on another thread: other connections go on, later requests of its own
 * wait, the client may leave meanwhile, a drain waits for it. */
static void test_serve_long_texts(void) {
    struct spawned s;
    struct peer p, other, leaver;
    msgpack_object o;
    peer_start(&s, &p, 100, 1);
    peer_open(&other, &s);
    peer_open(&leaver, &s);
    send_text(&leaver, 1, "tokenize", 'z', 90000);
    usleep(5000);
    peer_close(&leaver);
    for (int i = 0; i < 3; i++) {
        send_text(&p, 10, "tokenize", 'a', 100000);
        peer_send(&p, "[0,11,'tokenize',['b']]");
        peer_send(&other, "[0,1,'tokenize',['c']]");
        peer_expect(&other, "[1, 1, nil, {\"tokens\"=>[99], \"count\"=>1}]");
        peer_expect_silence(&p, 5); /* the fake tokenizer sleeps for 50 ms over the long text */
        assert_true(peer_recv(&p, &o));
        assert_int_equal(o.via.array.ptr[1].via.u64, 10);
        assert_int_equal(map_int(&o.via.array.ptr[3], "count"), 100000);
        peer_expect(&p, "[1, 11, nil, {\"tokens\"=>[98], \"count\"=>1}]");
    }
    assert_int_equal(peer_stat(&other, "connections"), 2);
    send_text(&p, 12, "tokenize", 'd', 50000);
    usleep(20000);
    kill(s.pid, SIGTERM);
    assert_true(peer_recv(&p, &o));
    assert_int_equal(map_int(&o.via.array.ptr[3], "count"), 50000);
    peer_expect_closed(&p, 2000);
    peer_close(&p);
    peer_close(&other);
    assert_int_equal(spawned_wait(&s, 3000), 0);
}

static void test_serve_duplicate_ids(void) {
    struct spawned s;
    struct peer p;
    peer_start(&s, &p, 20000, 1);
    peer_send(&p, "[0,7,'generate',['ab',{'max_tokens':8,'stream':false}]] [0,7,'stats',[]]");
    peer_expect(
        &p, "[1, 7, [12, \"request 7 is still unanswered\", {\"name\"=>\"duplicate_id\"}], nil]");
    peer_expect(&p, "[1, 7, nil, {\"text\"=>\"abababab\", %}, %}, %}]");
    /* answered: the id is free again, and a stream's id is free at once */
    peer_send(&p, "[0,7,'generate',['ab',{'max_tokens':2}]] [0,7,'tokenize',['a']]");
    peer_expect(&p, "[1, 7, nil, {\"stream\"=>1}]");
    peer_expect(&p, "[1, 7, nil, {\"tokens\"=>[97], \"count\"=>1}]");
    peer_stop(&s, &p);
}

/* The bytes that docs/protocol.md shows, as they are on the wire. */
static void hex_line(const char *line, struct strbuf *out) {
    for (const char *t = line + 8; *t; t++) {
        unsigned b;
        if (*t == ' ' || *t == '\n') continue;
        if (sscanf(t, "%2x", &b) != 1) fail_msg("no hex: %s", line);
        strbuf_append_char(out, (char)b);
        t++;
    }
}

static void test_serve_protocol_document(void) {
    struct spawned s;
    struct peer p;
    struct strbuf want = {0}, ask = {0};
    char line[1024];
    int n_dumps = 0;
    FILE *f = fopen("docs/protocol.md", "r");
    if (!f) fail_msg("docs/protocol.md: %s", strerror(errno));
    peer_start(&s, &p, 20000, 3);
    while (fgets(line, sizeof line, f)) {
        bool client = strncmp(line, "    C>  ", 8) == 0, server = strncmp(line, "    S>  ", 8) == 0;
        if (client) {
            strbuf_clear(&ask);
            hex_line(line, &ask);
            peer_send_bytes(&p, ask.data, ask.n);
            n_dumps++;
        } else if (server) {
            msgpack_object o;
            strbuf_clear(&want);
            hex_line(line, &want);
            do assert_true(peer_recv(&p, &o)); /* `done` is not shown: its timings differ */
            while (strstr(p.text, "\"done\""));
            if (p.n_message != want.n || memcmp(p.in.data, want.data, want.n) != 0) {
                for (size_t i = 0; i < p.n_message; i++)
                    print_error("%02x ", (unsigned char)p.in.data[i]);
                fail_msg("\n%sgot %s", line, p.text);
            }
            n_dumps++;
        }
    }
    assert_true(n_dumps >= 5);
    fclose(f);
    strbuf_deinit(&want);
    strbuf_deinit(&ask);
    peer_stop(&s, &p);
}

const struct test tests[] = {
    {"serve_describes_itself", TEST_QUICK, 10000, test_serve_describes_itself},
    {"serve_generate_streams", TEST_QUICK, 10000, test_serve_generate_streams},
    {"serve_unary", TEST_QUICK, 10000, test_serve_unary},
    {"serve_text_edges", TEST_QUICK, 10000, test_serve_text_edges},
    {"serve_bad_params", TEST_QUICK, 10000, test_serve_bad_params},
    {"serve_too_long", TEST_QUICK, 10000, test_serve_too_long},
    {"serve_long_texts", TEST_QUICK, 10000, test_serve_long_texts},
    {"serve_duplicate_ids", TEST_QUICK, 10000, test_serve_duplicate_ids},
    {"serve_protocol_document", TEST_QUICK, 10000, test_serve_protocol_document},
    {0},
};
