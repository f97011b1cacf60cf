/* serve/: what requests may say of speculation and conversations, and what they are told. Method as
 * in tests/test_serve.c; the fake engine's rounds are of a fixed shape (tests/fake_engine.h), so
 * every count is known. */
#include "tests/harness.h"

#include <stdio.h>
#include <string.h>

#include "serve/rpc.h"
#include "tests/peer.h"

static const struct {
    const char *options, *message, *param;
} refusals[] = {
    {"'draft_tokens':17", "draft_tokens is 17, allowed is \"auto\" or [0, 16]", "draft_tokens"},
    {"'draft_tokens':-1", "draft_tokens is -1, allowed is \"auto\" or [0, 16]", "draft_tokens"},
    {"'draft_tokens':1e300", "draft_tokens is 1e+300, allowed is \"auto\" or [0, 16]",
     "draft_tokens"},
    {"'draft_tokens':1.5", "draft_tokens must be \"auto\" or an integer in [0, 16]",
     "draft_tokens"},
    {"'draft_tokens':'many'", "draft_tokens must be \"auto\" or an integer in [0, 16]",
     "draft_tokens"},
    {"'draft_tokens':true", "draft_tokens must be \"auto\" or an integer in [0, 16]",
     "draft_tokens"},
    {"'coupling':'tree'", "coupling is \"tree\", allowed is \"lossless\" or \"gumbel\"",
     "coupling"},
    {"'coupling':''", "coupling is \"\", allowed is \"lossless\" or \"gumbel\"", "coupling"},
    {"'coupling':1", "coupling must be \"lossless\" or \"gumbel\", not an integer", "coupling"},
    {"'sparse':'observe'",
     "sparse is \"observe\", allowed is \"off\", \"all\", \"observed\", \"scorer\", "
     "\"mean\", \"minmax\", \"bound\", \"recent\" or \"random\"",
     "sparse"},
    {"'sparse':true", "sparse must be a str or false, not a boolean", "sparse"},
    {"'keep':0", "keep is 0, allowed is \"curve\" or (0, 1]", "keep"},
    {"'keep':1.01", "keep is 1.01, allowed is \"curve\" or (0, 1]", "keep"},
    {"'keep':'most'",
     "keep is \"most\", allowed is \"curve\", (0, 1] or up to 8 points TOKENS:KEEP, tokens "
     "ascending",
     "keep"},
    {"'keep':true", "keep must be \"curve\", points TOKENS:KEEP,... or a number in (0, 1]", "keep"},
    {"'keep_blocks':-1", "keep_blocks is -1, allowed is [0, 1048576]", "keep_blocks"},
    {"'min_blocks':0", "min_blocks is 0, allowed is [1, 1048576]", "min_blocks"},
    {"'window_blocks':1.5", "window_blocks must be an integer, not 1.5", "window_blocks"},
    {"'reserve':2", "reserve is 2, allowed is [0, 1]", "reserve"},
    {"'keep_threshold':'low'", "keep_threshold must be a number, \"off\" or false, not a str",
     "keep_threshold"},
    {"'keep_threshold':1e300", "keep_threshold is 1e+300, allowed is [-1e+30, 1e+30]",
     "keep_threshold"},
    {"'smooth':1.5", "smooth is 1.5, allowed is [0, 1]", "smooth"},
    {"'reselect':0",
     "reselect is 0, allowed is \"off\", \"step\", \"surprise\" or [1, 1048576] tokens",
     "reselect"},
    {"'reselect':'often'",
     "reselect is \"often\", allowed is \"off\", \"step\", \"surprise\" or [1, 1048576] "
     "tokens",
     "reselect"},
    {"'reselect':1.5",
     "reselect must be \"off\", \"step\", \"surprise\" or an integer in [1, 1048576]", "reselect"},
    {"'exact':17", "exact is 17, allowed is true, false or [0, 16]", "exact"},
    {"'exact':-1", "exact is -1, allowed is true, false or [0, 16]", "exact"},
    {"'exact':2.5", "exact must be true, false or an integer in [0, 16], not a float", "exact"},
    {"'exact':'on'", "exact must be true, false or an integer in [0, 16], not a str", "exact"},
    {"'prefill':'none'", "prefill is \"none\", allowed is \"dense\" or \"sparse\"", "prefill"},
    {"'prefill':true", "prefill must be a str, not a boolean", "prefill"},
    {"'prefill_dense':-1", "prefill_dense is -1, allowed is [0, 1048576]", "prefill_dense"},
    {"'lists':'heads'", "lists is \"heads\", allowed is \"one\", \"layer\" or \"head\"", "lists"},
    {"'lists':3", "lists must be a str, not an integer", "lists"},
    {"'quarters':0", "quarters is 0, allowed is [1, 4]", "quarters"},
    {"'select2':-1", "select2 is -1, allowed is [0, 1048576]", "select2"},
    {"'prefill_chunk':63", "prefill_chunk is 63, allowed is [64, 1048576]", "prefill_chunk"},
    {"'reselector':'observed'",
     "reselector is \"observed\", allowed is \"scorer\", \"mean\", \"minmax\", "
     "\"bound\", \"recent\" or \"random\"",
     "reselector"},
    {"'recheck':'all'", "recheck is \"all\", allowed is \"off\" or \"border\"", "recheck"},
    {"'recheck':true", "recheck must be a str, not a boolean", "recheck"},
    {"'drop':1.5", "drop is 1.5, allowed is [0, 1)", "drop"},
    {"'drop':1", "drop is 1, allowed is [0, 1)", "drop"},
    {"'surprise':0", "surprise is 0, allowed is (0, 100]", "surprise"},
    {"'lookup':1", "lookup must be true or false, not an integer", "lookup"},
    {"'draft_model':'no'", "draft_model must be true or false, not a str", "draft_model"},
    {"'drafted':'yes'", "drafted must be true or false, not a str", "drafted"},
    {"'conversation':''", "conversation has 0 bytes, allowed is [1, 256]", "conversation"},
    {"'conversation':-1", "conversation must be a str, an integer from 0 to 2^64 - 1, or false",
     "conversation"},
    {"'conversation':true", "conversation must be a str, an integer from 0 to 2^64 - 1, or false",
     "conversation"},
    {"'conversation':['a']", "conversation must be a str, an integer from 0 to 2^64 - 1, or false",
     "conversation"},
};

/* Every refusal names the option, the value and what is allowed; the connection goes on. */
static void test_serve_speculation_refusals(void) {
    struct spawned s;
    struct peer p;
    char want[400];
    peer_start(&s, &p, 0, 1);
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        peer_send(&p, "[0,%zu,'generate',['x',{%s}]]", i, refusals[i].options);
        snprintf(want, sizeof want,
                 "[1, %zu, [4, \"%s\", {\"name\"=>\"invalid_params\", \"param\"=>\"%s\"}], nil]", i,
                 refusals[i].message, refusals[i].param);
        peer_expect(&p, want);
    }
    char longest[258];
    memset(longest, 'c', 257);
    longest[257] = 0;
    peer_send(&p, "[0,90,'generate',['x',{'conversation':'%s'}]]", longest);
    peer_expect(&p, "[1, 90, [4, \"conversation has 257 bytes, allowed is [1, 256]\", {%}], nil]");
    peer_send(&p, "[0,91,'generate',['x',{'draft_token':1}]]");
    peer_expect(&p, "[1, 91, [4, \"unknown option \"draft_token\"; did you mean "
                    "\"draft_tokens\"?\", {%}], nil]");
    peer_send(&p,
              "[0,92,'chat',[[{'role':'user','content':'hi!'}],{'stream':false,'lookup':false,'"
              "draft_model':false,"
              "'draft_tokens':'auto','coupling':'gumbel','conversation':18446744073709551615}]]");
    peer_expect(&p, "[1, 92, nil, {\"text\"=>\"hi!\", %}]");
    peer_send(&p, "[0,93,'generate',['x',{'keep':0.5,'keep_blocks':3}]]");
    peer_expect(&p, "[1, 93, [4, \"keep and keep_blocks 3: one of them decides, not both\", {%}], "
                    "nil]");
    peer_stop(&s, &p);
}

/* What a request says of sparse reading, and what `done` tells. */
static void test_serve_sparsity(void) {
    struct spawned s;
    struct peer p;
    peer_start(&s, &p, 0, 1);
    peer_send(&p, "[0,1,'generate',['abcdefghijkl',{'max_tokens':1,'stream':false,'sparse':"
                  "'observed','keep_blocks':5,'window_blocks':2,'reselect':'surprise',"
                  "'reselector':'recent','surprise':0.25,'smooth':0.5,'keep_threshold':false,"
                  "'recheck':'border','drop':0.25}]]");
    peer_expect(
        &p, "[1, 1, nil, {%\"sparsity\"=>{\"selector\"=>\"observed\", \"keep\"=>nil, "
            "\"keep_blocks\"=>5, \"selections\"=>1, \"blocks\"=>12, \"kept\"=>5, "
            "\"first_kept\"=>5, \"lists\"=>\"one\", \"select2\"=>0, \"quarters\"=>4, "
            "\"n_lists\"=>1, \"union\"=>5, \"reselect\"=>\"surprise\", \"reselector\"=>\"recent\", "
            "\"recheck\"=>\"border\", \"drop\"=>0.250000, \"dropped\"=>2, \"wide\"=>0, \"cut\"=>0, "
            "\"select_ms\"=>0.000000, "
            "\"kv_shallow_bytes\"=>1000, \"kv_deep_bytes\"=>500, "
            "\"kv_dense_bytes\"=>3000, \"prefill\"=>nil, \"exact\"=>nil}}]");
    peer_send(&p, "[0,2,'generate',['abcdefghijkl',{'max_tokens':1,'stream':false,'sparse':"
                  "'random','keep':0.25,'min_blocks':1,'reselect':64}]]");
    peer_expect(&p, "[1, 2, nil, {%\"sparsity\"=>{\"selector\"=>\"random\", "
                    "\"keep\"=>0.250000, \"keep_blocks\"=>nil, \"selections\"=>1, "
                    "\"blocks\"=>12, \"kept\"=>4, %\"reselect\"=>64, "
                    "\"reselector\"=>\"random\", %}}]");
    peer_send(&p, "[0,3,'generate',['ab',{'max_tokens':1,'stream':false,'sparse':'recent'}]]");
    peer_expect(&p, "[1, 3, nil, {%\"sparsity\"=>{\"selector\"=>\"recent\", "
                    "\"keep\"=>\"curve\", %\"kept\"=>2, %}}]");
    peer_send(&p, "[0,5,'generate',['abcdefghijkl',{'max_tokens':1,'stream':false,'sparse':"
                  "'observed','keep_blocks':5,'exact':true}]]");
    peer_expect(&p, "[1, 5, nil, {%\"exact\"=>{\"limit\"=>16, \"passes\"=>2, "
                    "\"provisional\"=>32, \"accepted\"=>21, \"tokens\"=>23, "
                    "\"tokens_per_pass\"=>11.500000}}}]");
    peer_send(&p, "[0,6,'generate',['abcdefghijkl',{'max_tokens':1,'stream':false,'keep_blocks':5,"
                  "'prefill':'sparse','prefill_dense':4,'prefill_chunk':128}]]");
    peer_expect(&p, "[1, 6, nil, {%\"selector\"=>\"observed\", %\"prefill\"=>{\"dense\"=>4, "
                    "\"chunk\"=>128, \"selections\"=>3, \"blocks\"=>10, \"kept\"=>6, "
                    "\"kv_bytes\"=>700, \"kv_dense_bytes\"=>900}, \"exact\"=>nil}}]");
    peer_send(&p, "[0,8,'generate',['abcdefghijkl',{'max_tokens':1,'stream':false,'sparse':"
                  "'observed','keep_blocks':5,'lists':'layer'}]]");
    peer_expect(&p, "[1, 8, nil, {%\"lists\"=>\"layer\", \"select2\"=>0, \"quarters\"=>4, "
                    "\"n_lists\"=>3, %}}]");
    peer_send(&p, "[0,7,'generate',['ab',{'prefill':'sparse','prefill_chunk':100}]]");
    peer_expect(&p, "[1, 7, [4, \"prefill_chunk is 100, allowed are multiples of 64 in [64, "
                    "1048576]\", {%}], nil]");
    peer_send(&p, "[0,4,'generate',['ab',{'max_tokens':1,'stream':false,'sparse':false}]]");
    peer_expect(&p, "[1, 4, nil, {%\"sparsity\"=>{\"selector\"=>\"off\"}}]");
    peer_stop(&s, &p);
}

/* 20 tokens in rounds of 3: six of two accepted draft tokens, a refused one and the target's own,
 * and a last one that ends within its draft tokens. */
static void test_serve_speculation_done(void) {
    struct spawned s;
    struct peer p;
    struct strbuf text = {0};
    msgpack_object done, o;
    int n;
    peer_start(&s, &p, 200, 3);
    peer_send(&p, "[0,1,'generate',['hello ',{'max_tokens':20}]]");
    peer_expect(&p, "[1, 1, nil, {\"stream\"=>1}]");
    peer_collect(&p, 1, &text, &n, &done);
    const msgpack_object *spec = map_get(&done, "speculation");
    assert_int_equal(map_int(spec, "rounds"), 7);
    assert_int_equal(map_int(spec, "plain_rounds"), 0);
    assert_int_equal(map_int(spec, "drafted"), 20);
    assert_int_equal(map_int(spec, "accepted"), 14);
    assert_true(map_get(spec, "acceptance")->via.f64 == 0.7);
    assert_true(map_get(spec, "tokens_per_round")->via.f64 == 3.0);
    assert_true(map_get(spec, "draft_ms")->via.f64 == 7);
    assert_true(map_get(spec, "verify_ms")->via.f64 == 21);
    assert_int_equal(map_int(spec, "page_rollbacks"), 6);
    assert_null(rpc_get(spec, "no_draft"));
    /* off, and unary: one plain round a token, shares of nothing are nil */
    peer_send(&p, "[0,2,'generate',['ab',{'max_tokens':3,'stream':false,'draft_tokens':0}]]");
    peer_expect(&p, "[1, 2, nil, {%\"speculation\"=>{\"rounds\"=>0, \"plain_rounds\"=>3, "
                    "\"drafted\"=>0, \"accepted\"=>0, \"acceptance\"=>nil, "
                    "\"tokens_per_round\"=>nil, \"drafted_by_position\"=>[], "
                    "\"accepted_by_position\"=>[], \"lookup_drafted\"=>0, \"lookup_accepted\"=>0, "
                    "\"draft_ms\"=>0.000000, \"verify_ms\"=>0.000000, \"page_rollbacks\"=>0, "
                    "\"no_draft\"=>\"off\"}, %}]");
    /* a number cuts the round; what begins with no letter is by lookup; arrays end at the last
     * place that was filled */
    peer_send(&p, "[0,3,'generate',['12',{'max_tokens':4,'stream':false,'draft_tokens':1}]]");
    peer_expect(&p, "[1, 3, nil, {%\"speculation\"=>{\"rounds\"=>2, \"plain_rounds\"=>0, "
                    "\"drafted\"=>3, \"accepted\"=>2, %\"drafted_by_position\"=>[2, 1], "
                    "\"accepted_by_position\"=>[2, 0], \"lookup_drafted\"=>3, "
                    "\"lookup_accepted\"=>2, %}, %}]");
    peer_send(&p, "[0,4,'generate',['12',{'max_tokens':4,'stream':false,'lookup':false}]]");
    peer_expect(&p, "[1, 4, nil, {%\"lookup_drafted\"=>0, \"lookup_accepted\"=>0, %}, %}]");
    /* no memory for its draft: it answers all the same and says so */
    peer_send(&p, "[0,5,'generate',[[5,104],{'max_tokens':2,'stream':false}]]");
    peer_expect(&p, "[1, 5, nil, {\"text\"=>%\"no_draft\"=>\"draft memory short\"}, %}]");
    peer_send(&p, "[0,6,'stats',[]]");
    assert_true(peer_recv(&p, &o));
    const msgpack_object *all = &o.via.array.ptr[3];
    assert_int_equal(map_int(all, "draft_starved"), 1);
    assert_true(map_get(all, "overhead_seconds")->via.f64 > 0);
    spec = map_get(all, "speculation");
    assert_int_equal(map_int(spec, "plain_rounds"), 3 + 2);
    assert_int_equal(map_int(spec, "lookup_drafted"), 3);
    assert_int_equal(map_get(spec, "drafted_by_position")->via.array.size, 3);
    strbuf_deinit(&text);
    peer_stop(&s, &p);
}

/* Which tokens were drafted, and which text came with each: bytes held back count where they are
 * released. */
static void test_serve_speculation_drafted(void) {
    struct spawned s;
    struct peer p;
    peer_start(&s, &p, 0, 3);
    peer_send(&p, "[0,1,'generate',['hello ',{'max_tokens':8,'stream':false,'drafted':true}]]");
    peer_expect(&p, "[1, 1, nil, {\"text\"=>\"hello he\", \"tokens\"=>[%], "
                    "\"drafted\"=>[1, 1, 0, 1, 1, 0, 1, 1], "
                    "\"text_bytes\"=>[1, 1, 1, 1, 1, 1, 1, 1], \"finish_reason\"=>%]");
    peer_send(&p, "[0,2,'generate',['h\xc3\xa9',{'max_tokens':6,'stream':false,'drafted':true,"
                  "'draft_tokens':0}]]");
    peer_expect(&p, "[1, 2, nil, {\"text\"=>\"h\xc3\xa9h\xc3\xa9\", \"tokens\"=>[%], "
                    "\"drafted\"=>[0, 0, 0, 0, 0, 0], \"text_bytes\"=>[1, 0, 2, 1, 0, 2], %]");
    /* E may begin a stop string: the end releases it, beyond every token's bytes */
    peer_send(&p, "[0,3,'generate',['xE',{'max_tokens':4,'stream':false,'drafted':true,"
                  "'stop':'EN'}]]");
    peer_expect(&p, "[1, 3, nil, {\"text\"=>\"xExE\", \"tokens\"=>[%], \"drafted\"=>[1, 1, 0, 1], "
                    "\"text_bytes\"=>[1, 0, 2, 0], %]");
    /* the stop itself brings nothing */
    peer_send(&p, "[0,4,'generate',['abEND',{'stream':false,'drafted':true,'stop':'END'}]]");
    peer_expect(&p, "[1, 4, nil, {\"text\"=>\"ab\", \"tokens\"=>[97, 98, 69, 78, 68], "
                    "\"drafted\"=>[1, 1, 0, 1, 1], \"text_bytes\"=>[1, 1, 0, 0, 0], "
                    "\"finish_reason\"=>\"stop\", \"stop_reason\"=>\"END\", %]");
    peer_send(&p, "[0,5,'generate',['ab',{'max_tokens':3,'stream':false,'drafted':false}]]");
    peer_expect(&p, "[1, 5, nil, {\"text\"=>\"aba\", \"tokens\"=>[%], \"finish_reason\"=>%]");
    /* as notifications, with logprobs beside: the arrays fit their `tokens` */
    peer_send(&p, "[0,6,'generate',['hello ',{'max_tokens':300,'drafted':true,'logprobs':0}]]");
    peer_expect(&p, "[1, 6, nil, {\"stream\"=>1}]");
    long long n_tokens = 0, n_drafted = 0;
    for (;;) {
        msgpack_object o;
        assert_true(peer_recv(&p, &o));
        const msgpack_object *body = &o.via.array.ptr[2].via.array.ptr[1];
        if (!rpc_get(body, "seq")) break;
        uint32_t n = map_get(body, "tokens")->via.array.size;
        const msgpack_object_array *flags = &map_get(body, "drafted")->via.array;
        const msgpack_object_array *bytes = &map_get(body, "text_bytes")->via.array;
        assert_int_equal(flags->size, n);
        assert_int_equal(bytes->size, n);
        assert_int_equal(map_get(body, "logprobs")->via.array.size, n);
        assert_int_equal(map_get(body, "text")->via.str.size, n);
        for (uint32_t i = 0; i < n; i++) {
            assert_int_equal(bytes->ptr[i].via.u64, 1);
            assert_int_equal(flags->ptr[i].via.u64, (n_tokens + i) % 3 != 2);
            n_drafted += (long long)flags->ptr[i].via.u64;
        }
        n_tokens += n;
    }
    assert_int_equal(n_tokens, 300);
    assert_int_equal(n_drafted, 200);
    peer_stop(&s, &p);
}

static long long cached(struct peer *p, const char *prompt, const char *options) {
    msgpack_object o;
    peer_send(p, "[0,7,'generate',['%s',{'max_tokens':4,'stream':false%s}]]", prompt, options);
    assert_true(peer_recv(p, &o));
    if (o.via.array.ptr[2].type != MSGPACK_OBJECT_NIL) fail_msg("%s", p->text);
    return map_int(map_get(&o.via.array.ptr[3], "usage"), "cached_tokens");
}

/* A conversation is the connection's unless the client names one; names hold on every connection,
 * within one salt; a name and a number differ; false belongs to nobody. */
static void test_serve_conversations(void) {
    struct spawned s;
    struct peer a, b;
    peer_start(&s, &a, 0, 1);
    peer_open(&b, &s);
    assert_int_equal(cached(&a, "abcd", ""), 0);
    assert_int_equal(cached(&a, "abcdabcdx", ""), 8); /* prompt and answer of before */
    assert_int_equal(cached(&b, "abcdabcdx", ""), 0); /* another connection's */
    assert_int_equal(cached(&b, "abcdabcdx", ",'conversation':false"), 0);
    assert_int_equal(cached(&b, "abcdabcdx", ",'conversation':false"), 0);
    assert_int_equal(cached(&a, "abcd", ",'conversation':'c1'"), 0);
    assert_int_equal(cached(&b, "abcdabcd", ",'conversation':'c1'"), 8);
    assert_int_equal(cached(&b, "abcdabcd", ",'conversation':'c1','cache_salt':'s'"), 0);
    assert_int_equal(cached(&b, "abcdabcd", ",'conversation':'c1','cache_salt':'t'"), 0);
    assert_int_equal(cached(&a, "abcdabcd", ",'conversation':'c1','cache_salt':'s'"), 8);
    assert_int_equal(cached(&a, "abcd", ",'conversation':1"), 0);
    assert_int_equal(cached(&b, "abcd", ",'conversation':'1'"), 0);
    assert_int_equal(cached(&b, "abcd", ",'conversation':1"), 4);
    assert_int_equal(cached(&b, "abcd", ",'conversation':1.0"), 4);
    assert_int_equal(cached(&b, "abcd", ",'conversation':0"), 0);
    assert_int_equal(cached(&b, "abcd", ",'conversation':0"), 4); /* a number like others */
    assert_int_equal(cached(&b, "abcd", ",'conversation':nil,'cache_salt':'u'"), 0);
    assert_int_equal(cached(&b, "abcd", ",'cache_salt':'u'"), 4);
    peer_close(&b);
    peer_open(&b, &s); /* a new connection begins anew */
    assert_int_equal(cached(&b, "abcd", ""), 0);
    peer_close(&b);
    peer_stop(&s, &a);
}

/* A server's own coupling holds for requests that name none, and hello tells it. */
static void test_serve_coupling_default(void) {
    struct spawned s;
    struct serve_options o;
    struct peer p;
    peer_options(&o);
    o.coupling = VERIFY_GUMBEL;
    spawn_server(&s, &o, 0, 1);
    peer_open(&p, &s);
    peer_send(&p, "[0,1,'models',[]]");
    peer_expect(&p, "[1, 1, nil, [{%\"draft\"=>{\"name\"=>\"fake draft\", %}, \"speculation\"=>{%"
                    "\"coupling\"=>\"gumbel\"}, %}]]");
    peer_stop(&s, &p);
}

const struct test tests[] = {
    {"serve_speculation_refusals", TEST_QUICK, 10000, test_serve_speculation_refusals},
    {"serve_speculation_done", TEST_QUICK, 10000, test_serve_speculation_done},
    {"serve_speculation_drafted", TEST_QUICK, 10000, test_serve_speculation_drafted},
    {"serve_conversations", TEST_QUICK, 10000, test_serve_conversations},
    {"serve_sparsity", TEST_QUICK, 10000, test_serve_sparsity},
    {"serve_coupling_default", TEST_QUICK, 10000, test_serve_coupling_default},
    {0},
};
