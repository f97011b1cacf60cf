/* model/config: real configs of every family read back number by number; then one key is changed at
 * a time and the error must name it. */
#include "tests/harness.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "base/err.h"
#include "model/config.h"
#include "tests/gguf_builder.h"

/* ---- config.json ---- */

enum base { LLAMA32, MISTRAL, QWEN25, QWEN3, SMOLLM3 };

static const char *const bases[] = {
    [LLAMA32] =
        "{'architectures':['LlamaForCausalLM'],'attention_bias':false,'mlp_bias':false,"
        "'hidden_act':'silu','hidden_size':2048,'intermediate_size':8192,'head_dim':64,"
        "'max_position_embeddings':131072,'model_type':'llama','num_attention_heads':32,"
        "'num_hidden_layers':16,'num_key_value_heads':8,'rms_norm_eps':1e-05,'rope_scaling':{"
        "'factor':32.0,'high_freq_factor':4.0,'low_freq_factor':1.0,"
        "'original_max_position_embeddings':8192,'rope_type':'llama3'},'rope_theta':500000.0,"
        "'tie_word_embeddings':true,'torch_dtype':'bfloat16','vocab_size':128256}",
    [MISTRAL] = "{'architectures':['MistralForCausalLM'],'hidden_act':'silu','hidden_size':4096,"
                "'intermediate_size':14336,'max_position_embeddings':32768,'model_type':'mistral',"
                "'num_attention_heads':32,'num_hidden_layers':32,'num_key_value_heads':8,"
                "'rms_norm_eps':1e-05,'rope_theta':10000.0,'sliding_window':4096,"
                "'tie_word_embeddings':false,'vocab_size':32000}",
    [QWEN25] = "{'architectures':['Qwen2ForCausalLM'],'hidden_act':'silu','hidden_size':896,"
               "'intermediate_size':4864,'max_position_embeddings':32768,'max_window_layers':21,"
               "'model_type':'qwen2','num_attention_heads':14,'num_hidden_layers':24,"
               "'num_key_value_heads':2,'rms_norm_eps':1e-06,'rope_theta':1000000.0,"
               "'sliding_window':32768,'tie_word_embeddings':true,'use_sliding_window':false,"
               "'vocab_size':151936}",
    [QWEN3] = "{'architectures':['Qwen3ForCausalLM'],'attention_bias':false,'head_dim':128,"
              "'hidden_act':'silu','hidden_size':1024,'intermediate_size':3072,"
              "'max_position_embeddings':40960,'max_window_layers':28,'model_type':'qwen3',"
              "'num_attention_heads':16,'num_hidden_layers':28,'num_key_value_heads':8,"
              "'rms_norm_eps':1e-06,'rope_scaling':null,'rope_theta':1000000,'sliding_window':null,"
              "'tie_word_embeddings':true,'use_sliding_window':false,'vocab_size':151936}",
    [SMOLLM3] =
        "{'architectures':['SmolLM3ForCausalLM'],'attention_bias':false,'hidden_act':'silu',"
        "'hidden_size':2048,'intermediate_size':11008,'max_position_embeddings':65536,"
        "'mlp_bias':false,'model_type':'smollm3','no_rope_layer_interval':4,"
        "'no_rope_layers':[1,1,1,0,1,1,1,0],'num_attention_heads':16,'num_hidden_layers':8,"
        "'num_key_value_heads':4,'rms_norm_eps':1e-06,'rope_theta':5000000.0,"
        "'sliding_window':null,'use_sliding_window':false,'vocab_size':128256}",
};

/* JSON with ' for ". */
static json_t *parse(const char *text) {
    char buf[2048];
    size_t n = strlen(text);
    assert_true(n < sizeof buf);
    for (size_t i = 0; i <= n; i++) buf[i] = text[i] == '\'' ? '"' : text[i];
    json_error_t why;
    json_t *v = json_loads(buf, 0, &why);
    if (!v) fail_msg("%s: %s", text, why.text);
    return v;
}

/* The base with `change` laid over it; a value of 'GONE' removes the key. */
static int read_json(struct model_config *c, enum base base, const char *change, struct err *e) {
    json_t *obj = parse(bases[base]), *over = parse(change), *value;
    const char *key;
    json_object_foreach(over, key, value) {
        const char *s = json_string_value(value);
        if (s && strcmp(s, "GONE") == 0) json_object_del(obj, key);
        else json_object_set(obj, key, value);
    }
    char *text = json_dumps(obj, 0);
    size_t n = strlen(text);
    char *exact = malloc(n); /* no NUL behind: a reader that wants one is caught */
    memcpy(exact, text, n);
    int rc = model_config_from_json(c, exact, n, e);
    free(exact);
    free(text);
    json_decref(obj);
    json_decref(over);
    return rc;
}

static void test_config_json_families(void) {
    struct model_config c;
    struct err e = {0};
    assert_ok(read_json(&c, LLAMA32, "{}", &e), e);
    assert_string_equal(c.arch, "llama");
    assert_int_equal(c.n_layers, 16);
    assert_int_equal(c.hidden, 2048);
    assert_int_equal(c.ffn, 8192);
    assert_int_equal(c.n_heads, 32);
    assert_int_equal(c.n_kv_heads, 8);
    assert_int_equal(c.head_dim, 64);
    assert_int_equal(c.vocab, 128256);
    assert_int_equal(c.context, 131072);
    assert_int_equal(c.rope_scaling, ROPE_LLAMA3);
    assert_int_equal(c.rope_original_context, 8192);
    assert_near(c.rope_factor, 32, 0);
    assert_near(c.rope_base, 500000, 0);
    assert_near(c.norm_eps, 1e-5f, 0);
    assert_true(c.tied && !c.qkv_bias && !c.qk_norm && !c.rope_interleaved);
    assert_true(!c.borrows_embedding && !c.borrows_head);
    assert_int_equal(c.n_head, c.vocab);

    assert_ok(read_json(&c, QWEN25, "{}", &e), e);
    assert_string_equal(c.arch, "qwen2");
    assert_true(c.qkv_bias && !c.qk_norm);
    assert_int_equal(c.head_dim, 64);
    assert_int_equal(c.context, 32768);

    assert_ok(read_json(&c, QWEN3, "{}", &e), e);
    assert_true(c.qk_norm && !c.qkv_bias);
    assert_int_equal(c.head_dim, 128); /* not 1024 / 16 */
    assert_ok(read_json(&c, QWEN3, "{'head_dim':'GONE'}", &e), e);
    assert_int_equal(c.head_dim, 128); /* its class's own default */
    assert_ok(read_json(&c, LLAMA32, "{'head_dim':null}", &e), e);
    assert_int_equal(c.head_dim, 64);
    assert_ok(read_json(&c, LLAMA32, "{'num_key_value_heads':'GONE'}", &e), e);
    assert_int_equal(c.n_kv_heads, 32);

    assert_ok(read_json(&c, SMOLLM3, "{}", &e), e);
    static const uint8_t skip[8] = {0, 0, 0, 1, 0, 0, 0, 1};
    assert_memory_equal(c.rope_skip, skip, 8);
    assert_true(c.tied); /* the class's default, the key is absent */
    assert_ok(read_json(&c, SMOLLM3, "{'no_rope_layers':'GONE'}", &e), e);
    assert_memory_equal(c.rope_skip, skip, 8);
    assert_ok(read_json(&c, SMOLLM3, "{'no_rope_layers':[0,1,1,1,1,1,1,1]}", &e), e);
    assert_int_equal(c.rope_skip[0], 1);
    assert_int_equal(c.rope_skip[3], 0);
    assert_ok(read_json(&c, SMOLLM3, "{'no_rope_layers':null,'no_rope_layer_interval':2}", &e), e);
    assert_int_equal(c.rope_skip[1], 1);
}

static void test_config_json_windows(void) {
    static const struct {
        enum base base;
        const char *change;
        int context;
    } cases[] = {
        {MISTRAL, "{}", 4096},                       /* v0.1: the context ends at the window */
        {MISTRAL, "{'sliding_window':null}", 32768}, /* v0.2 and later */
        {MISTRAL, "{'sliding_window':'GONE'}", 4096},
        {MISTRAL, "{'sliding_window':65536}", 32768},
        {QWEN25, "{'sliding_window':1024}", 32768}, /* not in use */
        {QWEN25, "{'sliding_window':1024,'use_sliding_window':true}", 1024},
        {QWEN25, "{'sliding_window':1024,'use_sliding_window':true,'max_window_layers':24}", 32768},
        {QWEN3, "{'layer_types':['full_attention','full_attention']}", 40960},
        {QWEN3,
         "{'layer_types':['full_attention','sliding_attention'],'sliding_window':2048,"
         "'use_sliding_window':true}",
         2048},
        {SMOLLM3, "{'sliding_window':512,'use_sliding_window':true}", 512},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct model_config c;
        struct err e = {0};
        assert_ok(read_json(&c, cases[i].base, cases[i].change, &e), e);
        if (c.context != cases[i].context)
            fail_msg("%s: context %d, wanted %d", cases[i].change, c.context, cases[i].context);
    }
}

static void test_config_json_rope(void) {
    struct model_config c;
    struct err e = {0};
    assert_ok(read_json(&c, QWEN25,
                        "{'rope_scaling':{'type':'yarn','factor':4.0,"
                        "'original_max_position_embeddings':32768}}",
                        &e),
              e);
    assert_int_equal(c.rope_scaling, ROPE_YARN);
    assert_int_equal(c.context, 131072);
    assert_near(c.rope_attention_factor, 1.138629436111989, 1e-12);
    /* mscale and mscale_all_dim as DeepSeek has them, attention_factor before both. */
    assert_ok(read_json(&c, QWEN25,
                        "{'rope_scaling':{'rope_type':'yarn','factor':40,'mscale':0.8,"
                        "'mscale_all_dim':1.2,'original_max_position_embeddings':4096}}",
                        &e),
              e);
    assert_near(c.rope_attention_factor, 0.897720452428813, 1e-12);
    assert_ok(read_json(&c, QWEN25,
                        "{'rope_scaling':{'rope_type':'yarn','factor':40,'mscale':1.0,"
                        "'mscale_all_dim':1.0,'original_max_position_embeddings':4096}}",
                        &e),
              e);
    assert_near(c.rope_attention_factor, 1, 0);
    assert_ok(read_json(&c, QWEN25,
                        "{'rope_scaling':{'rope_type':'yarn','factor':4,'attention_factor':0.9,"
                        "'mscale':0.8,'mscale_all_dim':1.2,'beta_fast':16,'beta_slow':0}}",
                        &e),
              e);
    assert_near(c.rope_attention_factor, 0.9, 0);
    assert_near(c.rope_beta_fast, 16, 0);
    assert_near(c.rope_beta_slow, 1, 0);
    assert_int_equal(c.rope_original_context, 32768); /* max_position_embeddings */
    /* No factor: positions over original. */
    assert_ok(read_json(&c, QWEN25,
                        "{'rope_scaling':{'rope_type':'yarn','factor':null,"
                        "'original_max_position_embeddings':8192}}",
                        &e),
              e);
    assert_near(c.rope_factor, 4, 0);
    assert_ok(
        read_json(&c, LLAMA32,
                  "{'max_position_embeddings':4096,'rope_scaling':{'type':'linear','factor':4}}",
                  &e),
        e);
    assert_int_equal(c.rope_scaling, ROPE_LINEAR);
    assert_int_equal(c.context, 16384);
    /* The newer form, flat and one object per kind of layer. */
    assert_ok(
        read_json(&c, LLAMA32,
                  "{'rope_scaling':'GONE','rope_theta':'GONE','rope_parameters':{'factor':8.0,"
                  "'high_freq_factor':4.0,'low_freq_factor':1.0,'rope_theta':250000.0,"
                  "'original_max_position_embeddings':8192,'rope_type':'llama3'}}",
                  &e),
        e);
    assert_int_equal(c.rope_scaling, ROPE_LLAMA3);
    assert_near(c.rope_base, 250000, 0);
    assert_ok(read_json(&c, QWEN3,
                        "{'rope_theta':'GONE','rope_parameters':{'full_attention':{"
                        "'rope_type':'default','rope_theta':123456}}}",
                        &e),
              e);
    assert_int_equal(c.rope_scaling, ROPE_NONE);
    assert_near(c.rope_base, 123456, 0);
    assert_ok(read_json(&c, SMOLLM3, "{'rope_theta':'GONE'}", &e), e);
    assert_near(c.rope_base, 2000000, 0);
}

static const struct {
    enum base base;
    const char *change;
    int code;
    const char *text;
} json_lies[] = {
    {LLAMA32, "{'architectures':['MixtralForCausalLM']}", E_UNSUPPORTED,
     "'MixtralForCausalLM' is not"},
    {LLAMA32, "{'architectures':['Qwen3MoeForCausalLM']}", E_UNSUPPORTED, "mixture-of-experts"},
    {LLAMA32, "{'architectures':['Gemma3ForCausalLM']}", E_UNSUPPORTED, "GeGLU"},
    {LLAMA32, "{'architectures':['FalconH1ForCausalLM']}", E_UNSUPPORTED, "recurrent state"},
    {LLAMA32, "{'architectures':['Qwen3NextForCausalLM']}", E_UNSUPPORTED, "linear attention"},
    {LLAMA32, "{'architectures':['Mamba2ForCausalLM']}", E_UNSUPPORTED, "recurrent state"},
    {LLAMA32, "{'architectures':['Qwen2_5_VLForConditionalGeneration']}", E_UNSUPPORTED, "images"},
    {LLAMA32, "{'architectures':['WhoKnows']}", E_UNSUPPORTED, "'WhoKnows' is not supported"},
    {LLAMA32, "{'architectures':'GONE','model_type':'gemma2'}", E_UNSUPPORTED, "gemma2"},
    {LLAMA32, "{'architectures':'GONE','model_type':'GONE'}", E_FORMAT, "neither architectures"},
    {LLAMA32, "{'attention_bias':true}", E_UNSUPPORTED, "attention_bias is true"},
    {QWEN3, "{'attention_bias':true}", E_UNSUPPORTED, "attention_bias is true"},
    {LLAMA32, "{'mlp_bias':true}", E_UNSUPPORTED, "mlp_bias is true"},
    {LLAMA32, "{'hidden_act':'gelu'}", E_UNSUPPORTED, "hidden_act is \"gelu\""},
    {LLAMA32, "{'num_local_experts':8}", E_UNSUPPORTED, "num_local_experts"},
    {LLAMA32, "{'partial_rotary_factor':0.5}", E_UNSUPPORTED, "partial_rotary_factor"},
    {LLAMA32, "{'quantization_config':{'quant_method':'gptq'}}", E_UNSUPPORTED, "gptq"},
    {LLAMA32, "{'hidden_size':'GONE'}", E_FORMAT, "hidden_size is missing"},
    {LLAMA32, "{'hidden_size':null}", E_FORMAT, "hidden_size is missing"},
    {LLAMA32, "{'hidden_size':'2048'}", E_FORMAT, "hidden_size: a string, expected a number"},
    {LLAMA32, "{'hidden_size':-1}", E_FORMAT, "hidden_size: -1 is outside"},
    {LLAMA32, "{'hidden_size':2048.5}", E_FORMAT, "hidden_size: 2048.5 is no integer"},
    {LLAMA32, "{'num_hidden_layers':257}", E_FORMAT, "num_hidden_layers: 257 is outside"},
    {LLAMA32, "{'num_hidden_layers':0}", E_FORMAT, "num_hidden_layers: 0 is outside"},
    {LLAMA32, "{'num_attention_heads':0}", E_FORMAT, "num_attention_heads"},
    {LLAMA32, "{'num_attention_heads':9223372036854775807}", E_FORMAT, "num_attention_heads"},
    {LLAMA32, "{'num_key_value_heads':5}", E_FORMAT, "32 query heads are no multiple of 5"},
    {LLAMA32, "{'num_key_value_heads':64}", E_FORMAT, "number of KV heads is 64, outside 1..32"},
    {LLAMA32, "{'num_attention_heads':128,'num_key_value_heads':1}", E_UNSUPPORTED,
     "128 query heads"},
    {QWEN25, "{'num_attention_heads':13}", E_FORMAT, "no multiple of num_attention_heads 13"},
    {LLAMA32, "{'head_dim':63}", E_FORMAT, "rope dimension 63 is odd"},
    {LLAMA32, "{'head_dim':512}", E_FORMAT, "head_dim: 512 is outside"},
    {LLAMA32, "{'vocab_size':2000000}", E_FORMAT, "vocab_size: 2000000 is outside"},
    {LLAMA32, "{'max_position_embeddings':0}", E_FORMAT, "max_position_embeddings"},
    {LLAMA32, "{'rms_norm_eps':0}", E_FORMAT, "rms_norm_eps: 0 is outside"},
    {LLAMA32, "{'rope_theta':1}", E_FORMAT, "rope base is 1"},
    {LLAMA32, "{'tie_word_embeddings':1}", E_FORMAT,
     "tie_word_embeddings: a number, expected a bool"},
    {LLAMA32, "{'rope_parameters':{'partial_rotary_factor':0.25}}", E_UNSUPPORTED, "partial rope"},
    {LLAMA32, "{'hidden_act':true}", E_FORMAT, "hidden_act: a bool, expected a string"},
    {LLAMA32, "{'hidden_size':{}}", E_FORMAT, "hidden_size: an object, expected a number"},
    {LLAMA32, "{'rope_scaling':[]}", E_FORMAT, "rope_scaling: an array, expected an object"},
    {LLAMA32, "{'rope_scaling':{'type':'dynamic','factor':2}}", E_UNSUPPORTED, "\"dynamic\""},
    {LLAMA32, "{'rope_scaling':{'rope_type':'longrope'}}", E_UNSUPPORTED, "\"longrope\""},
    {LLAMA32, "{'rope_scaling':{'type':'linear'}}", E_FORMAT, "factor is missing"},
    {LLAMA32, "{'rope_scaling':{'type':'linear','factor':0}}", E_FORMAT, "factor: 0 is outside"},
    {LLAMA32, "{'rope_scaling':{'factor':2}}", E_FORMAT, "neither rope_type nor type"},
    {LLAMA32, "{'rope_scaling':{'type':3}}", E_FORMAT, "type: a number, expected a string"},
    {LLAMA32,
     "{'rope_scaling':{'rope_type':'llama3','factor':8,'low_freq_factor':4,'high_freq_factor':4}}",
     E_FORMAT, "high_freq_factor 4 is not above"},
    {LLAMA32, "{'rope_scaling':{'rope_type':'llama3','factor':8,'low_freq_factor':1}}", E_FORMAT,
     "high_freq_factor is missing"},
    {QWEN25, "{'rope_scaling':{'type':'yarn','factor':4,'beta_fast':1,'beta_slow':2}}", E_FORMAT,
     "YaRN beta_fast"},
    {QWEN25, "{'rope_scaling':{'type':'yarn','factor':4,'truncate':false}}", E_UNSUPPORTED,
     "truncate"},
    {QWEN3, "{'layer_types':['linear_attention']}", E_UNSUPPORTED, "\"linear_attention\""},
    {QWEN3, "{'layer_types':['sliding_attention']}", E_UNSUPPORTED, "sliding_window is off"},
    {QWEN3, "{'layer_types':7}", E_FORMAT, "layer_types: a number"},
    {SMOLLM3, "{'no_rope_layers':[1,0]}", E_FORMAT, "no_rope_layers: no list of 8 layers"},
    {SMOLLM3, "{'no_rope_layers':[1,1,1,2,1,1,1,1]}", E_FORMAT, "element 3"},
};

static void test_config_json_names_every_lie(void) {
    for (size_t i = 0; i < sizeof json_lies / sizeof *json_lies; i++) {
        struct model_config c;
        struct err e = {0};
        int rc = read_json(&c, json_lies[i].base, json_lies[i].change, &e);
        if (rc != json_lies[i].code || !strstr(e.message, json_lies[i].text))
            fail_msg("%s: %s \"%s\", wanted %s with \"%s\"", json_lies[i].change, err_name(rc),
                     e.message, err_name(json_lies[i].code), json_lies[i].text);
    }
}

static void test_config_json_syntax(void) {
    static const char *const texts[] = {
        "", "{", "[]", "7", "{\"a\":1,\"a\":2}", "{}x", "{\"a\":1e999}"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        struct model_config c;
        struct err e = {0};
        assert_int_equal(model_config_from_json(&c, texts[i], strlen(texts[i]), &e), E_FORMAT);
    }
    json_t *obj = parse(bases[QWEN3]);
    char *text = json_dumps(obj, 0);
    for (size_t n = 0; n < strlen(text); n++) {
        struct model_config c;
        struct err e = {0};
        char *exact = malloc(n + 1);
        memcpy(exact, text, n);
        assert_int_equal(model_config_from_json(&c, exact, n, &e), E_FORMAT);
        free(exact);
    }
    free(text);
    json_decref(obj);
}

/* A name is for people and their terminals: what would command these is left out, and it ends with
 * a whole character. */
static void test_config_names(void) {
    static const char *const cases[][2] = {
        {"SmolLM2 135M", "SmolLM2 135M"},
        {"a\\u001b[31mb\\u0007\\n\\u007f\\u009bc", "a[31mbc"},
        {"\xc3\xa9\xe2\x82\xac", "\xc3\xa9\xe2\x82\xac"},
        {"", ""},
    };
    char change[400], euros[3 * 43 + 1] = "";
    struct model_config c;
    struct err e = {0};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        snprintf(change, sizeof change, "{'_name_or_path':'%s'}", cases[i][0]);
        assert_ok(read_json(&c, QWEN3, change, &e), e);
        assert_string_equal(c.name, cases[i][1]);
    }
    for (int i = 0; i < 43; i++) memcpy(euros + 3 * i, "\xe2\x82\xac", 4);
    snprintf(change, sizeof change, "{'_name_or_path':'x%s'}", euros);
    assert_ok(read_json(&c, QWEN3, change, &e), e);
    assert_int_equal(strlen(c.name), 1 + 3 * 42);
}

/* ---- GGUF ---- */

/* A key below the architecture's name; no text: a number, as u32 where it is whole, else f32. */
struct key {
    const char *name;
    double number;
    const char *text;
};

enum { MAX_KEYS = 32 };

/* Write a header of `arch` with the usual keys, `changes` laid over them (a number of NAN removes).
 */
static void build_gguf(struct strbuf *b, const char *arch, const struct key *changes) {
    struct key keys[MAX_KEYS] = {{"block_count", 8, 0},
                                 {"embedding_length", 64, 0},
                                 {"feed_forward_length", 128, 0},
                                 {"attention.head_count", 4, 0},
                                 {"attention.head_count_kv", 2, 0},
                                 {"context_length", 2048, 0},
                                 {"attention.layer_norm_rms_epsilon", 1e-5, 0},
                                 {"vocab_size", 100, 0}};
    size_t n = 8, written = 1;
    for (const struct key *k = changes; k && k->name; k++) {
        size_t i = 0;
        while (i < n && strcmp(keys[i].name, k->name) != 0) i++;
        keys[i] = *k;
        if (i == n) n++;
        assert_true(n < MAX_KEYS);
    }
    for (size_t i = 0; i < n; i++) written += !isnan(keys[i].number);
    memset(b, 0, sizeof *b);
    put_header(b, 3, 0, written);
    put_key_str(b, "general.architecture", arch);
    for (size_t i = 0; i < n; i++) {
        char name[128];
        snprintf(name, sizeof name, "%s.%s", arch, keys[i].name);
        if (isnan(keys[i].number)) continue;
        if (keys[i].text) put_key_str(b, name, keys[i].text);
        else if (keys[i].number == floor(keys[i].number))
            put_key_u32(b, name, (uint32_t)keys[i].number);
        else put_key_f32(b, name, (float)keys[i].number);
    }
}

static int read_gguf(struct model_config *c, const char *arch, const struct key *changes,
                     struct err *e) {
    struct strbuf b;
    struct gguf *g;
    build_gguf(&b, arch, changes);
    assert_ok(gguf_open_bytes(&g, (const uint8_t *)b.data, b.n, e), *e);
    int rc = model_config_from_gguf(c, g, e);
    gguf_close(g);
    strbuf_deinit(&b);
    return rc;
}

static void test_config_gguf_families(void) {
    struct model_config c;
    struct err e = {0};
    assert_ok(read_gguf(&c, "llama", NULL, &e), e);
    assert_int_equal(c.n_layers, 8);
    assert_int_equal(c.head_dim, 16);
    assert_int_equal(c.rope_dim, 16);
    assert_near(c.rope_base, 10000, 0);
    assert_true(c.rope_interleaved && c.tied && !c.qkv_bias);
    assert_int_equal(c.rope_skip[3], 0);
    assert_ok(read_gguf(&c, "qwen2", NULL, &e), e);
    assert_true(!c.rope_interleaved && c.qkv_bias);
    assert_ok(
        read_gguf(
            &c, "qwen3",
            (struct key[]){{"attention.key_length", 32, 0}, {"attention.value_length", 32, 0}, {0}},
            &e),
        e);
    assert_true(!c.rope_interleaved && c.qk_norm);
    assert_int_equal(c.head_dim, 32);
    assert_ok(read_gguf(&c, "smollm3", NULL, &e), e);
    assert_true(c.rope_interleaved);
    static const uint8_t skip[8] = {0, 0, 0, 1, 0, 0, 0, 1};
    assert_memory_equal(c.rope_skip, skip, 8);
    assert_ok(read_gguf(&c, "llama", (struct key[]){{"attention.sliding_window", 512, 0}, {0}}, &e),
              e);
    assert_int_equal(c.context, 512);
    assert_ok(read_gguf(&c, "llama", (struct key[]){{"attention.head_count_kv", NAN, 0}, {0}}, &e),
              e);
    assert_int_equal(c.n_kv_heads, 4);
    assert_ok(read_gguf(&c, "qwen2",
                        (struct key[]){{"rope.scaling.type", 0, "yarn"},
                                       {"rope.scaling.factor", 4, 0},
                                       {"rope.scaling.original_context_length", 1024, 0},
                                       {0}},
                        &e),
              e);
    assert_int_equal(c.rope_scaling, ROPE_YARN);
    assert_int_equal(c.context, 4096);
    assert_near(c.rope_attention_factor, 1.138629436111989, 1e-12);
    assert_ok(read_gguf(&c, "llama", (struct key[]){{"rope.scaling.factor", 2.5, 0}, {0}}, &e), e);
    assert_int_equal(c.rope_scaling, ROPE_LINEAR); /* a factor without a type */
    assert_int_equal(c.context, 5120);
    assert_ok(read_gguf(&c, "llama",
                        (struct key[]){
                            {"rope.scaling.factor", 2.5, 0}, {"rope.scaling.type", 0, "none"}, {0}},
                        &e),
              e);
    assert_int_equal(c.rope_scaling, ROPE_NONE);
    assert_near(c.rope_factor, 1, 0);
}

static const struct {
    const char *arch;
    struct key change;
    int code;
    const char *text;
} gguf_lies[] = {
    {"gemma3", {0}, E_UNSUPPORTED, "architecture 'gemma3' is not supported"},
    {"qwen3moe", {0}, E_UNSUPPORTED, "mixture-of-experts"},
    {"mamba2", {0}, E_UNSUPPORTED, "recurrent state"},
    {"phi3", {0}, E_UNSUPPORTED, "longrope"},
    {"what", {0}, E_UNSUPPORTED, "architecture 'what' is not supported"},
    {"llama", {"block_count", NAN, 0}, E_NOT_FOUND, "key llama.block_count is missing"},
    {"llama", {"block_count", 0, 0}, E_FORMAT, "key llama.block_count: 0 is outside 1..256"},
    {"llama", {"block_count", 1.5, 0}, E_FORMAT, "key llama.block_count: 1.5 is no integer"},
    {"llama", {"block_count", 0, "8"}, E_FORMAT, "of type string, expected an integer"},
    {"llama", {"attention.head_count", 3, 0}, E_FORMAT, "no multiple of head_count 3"},
    {"llama", {"attention.head_count_kv", 3, 0}, E_FORMAT, "no multiple of 3 KV heads"},
    {"llama", {"attention.head_count_kv", 8, 0}, E_FORMAT, "outside 1..4"},
    {"llama", {"attention.value_length", 8, 0}, E_UNSUPPORTED, "keys of 16 and values of 8"},
    {"llama", {"attention.layer_norm_rms_epsilon", NAN, 0}, E_NOT_FOUND, "epsilon is missing"},
    {"llama", {"attention.layer_norm_rms_epsilon", 0, 0}, E_FORMAT, "epsilon: 0 is outside"},
    {"llama", {"rope.dimension_count", 8, 0}, E_UNSUPPORTED, "partial rope"},
    {"llama", {"rope.freq_base", 1, 0}, E_FORMAT, "rope base is 1"},
    {"llama", {"rope.scaling.type", 0, "longrope"}, E_UNSUPPORTED, "\"longrope\""},
    {"llama", {"expert_count", 8, 0}, E_UNSUPPORTED, "mixture-of-experts"},
    {"llama", {"logit_scale", 0.5, 0}, E_UNSUPPORTED, "scaled logits"},
    {"llama", {"attention.scale", 0.5, 0}, E_UNSUPPORTED, "attention scale"},
    {"llama", {"context_length", 4e9, 0}, E_FORMAT, "context_length: 4000000000 is outside"},
    {"llama", {"vocab_size", NAN, 0}, E_NOT_FOUND, "tokenizer.ggml.tokens is missing"},
};

static void test_config_gguf_names_every_lie(void) {
    for (size_t i = 0; i < sizeof gguf_lies / sizeof *gguf_lies; i++) {
        struct model_config c;
        struct err e = {0};
        struct key changes[2] = {gguf_lies[i].change, {0}};
        int rc = read_gguf(&c, gguf_lies[i].arch, changes, &e);
        if (rc != gguf_lies[i].code || !strstr(e.message, gguf_lies[i].text))
            fail_msg("%s %s: %s \"%s\", wanted %s with \"%s\"", gguf_lies[i].arch,
                     gguf_lies[i].change.name ? gguf_lies[i].change.name : "", err_name(rc),
                     e.message, err_name(gguf_lies[i].code), gguf_lies[i].text);
    }
}

/* Keys that are lists a layer, a vocabulary told by its tokens, an encoder, no architecture. */
static void test_config_gguf_unusual(void) {
    static const struct {
        uint32_t elem;
        int32_t values[2];
        int code;
        const char *text;
    } cases[] = {
        {GGUF_I32, {2, 2}, 0, ""},
        {GGUF_U32, {4, 4}, 0, ""},
        {GGUF_I32, {2, 1}, E_UNSUPPORTED, "layers of different sizes (2 and 1)"},
        {GGUF_I32, {-2, -2}, E_FORMAT, "key llama.attention.head_count_kv: -2 is outside"},
        {GGUF_F32, {2, 2}, E_FORMAT, "no list of integers"},
    };
    struct model_config c;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int causal = 1; causal >= 0; causal--) {
            struct strbuf b = {0};
            struct gguf *g;
            struct err e = {0};
            put_header(&b, 3, 0, 11);
            put_key_str(&b, "general.architecture", "llama");
            put_key_str(&b, "general.name", "m\033]0;x\a\xff!");
            put_key_u32(&b, "llama.block_count", 2);
            put_key_u32(&b, "llama.embedding_length", 64);
            put_key_u32(&b, "llama.feed_forward_length", 64);
            put_key_u32(&b, "llama.attention.head_count", 4);
            put_array(&b, "llama.attention.head_count_kv", cases[i].elem, 2);
            for (int k = 0; k < 2; k++) put_little(&b, (uint32_t)cases[i].values[k], 4);
            put_key_u32(&b, "llama.context_length", 64);
            put_key_f32(&b, "llama.attention.layer_norm_rms_epsilon", 1e-6f);
            put_array(&b, "tokenizer.ggml.tokens", GGUF_STRING, 3);
            for (int k = 0; k < 3; k++) put_str(&b, "t");
            put_key(&b, "llama.attention.causal", GGUF_BOOL);
            put_little(&b, (uint64_t)causal, 1);
            assert_ok(gguf_open_bytes(&g, (const uint8_t *)b.data, b.n, &e), e);
            int code = model_config_from_gguf(&c, g, &e), want = cases[i].code;
            if (want == 0 && !causal) want = E_UNSUPPORTED;
            if (code != want || !strstr(e.message, cases[i].text))
                fail_msg("case %zu: %s \"%s\"", i, err_name(code), e.message);
            if (code == 0) {
                assert_int_equal(c.n_kv_heads, cases[i].values[0]);
                assert_int_equal(c.vocab, 3);
                assert_string_equal(c.name, "m]0;x?!");
            }
            if (want != cases[i].code) assert_non_null(strstr(e.message, "an encoder"));
            gguf_close(g);
            strbuf_deinit(&b);
        }
    struct strbuf b = {0};
    struct gguf *g;
    struct err e = {0};
    put_header(&b, 3, 0, 0);
    assert_ok(gguf_open_bytes(&g, (const uint8_t *)b.data, b.n, &e), e);
    assert_int_equal(model_config_from_gguf(&c, g, &e), E_FORMAT);
    assert_non_null(strstr(e.message, "general.architecture is missing"));
    gguf_close(g);
    strbuf_deinit(&b);
}

static void test_config_default_target(void) {
    struct gguf *g;
    struct model_config c;
    struct err e = {0};
    assert_ok(gguf_open(&g, test_default_target(), &e), e);
    assert_ok(model_config_from_gguf(&c, g, &e), e);
    assert_string_equal(c.arch, "llama");
    assert_int_equal(c.n_layers, 30);
    assert_int_equal(c.hidden, 576);
    assert_int_equal(c.ffn, 1536);
    assert_int_equal(c.n_heads, 9);
    assert_int_equal(c.n_kv_heads, 3);
    assert_int_equal(c.head_dim, 64);
    assert_int_equal(c.vocab, 49152);
    assert_int_equal(c.context, 8192);
    assert_near(c.rope_base, 100000, 0);
    assert_true(c.tied && c.rope_interleaved && !c.qkv_bias && !c.qk_norm);
    assert_true(!c.borrows_embedding && !c.borrows_head);
    assert_int_equal(c.n_head, c.vocab);
    gguf_close(g);
}

const struct test tests[] = {
    {"config_json_families", TEST_QUICK, 5000, test_config_json_families},
    {"config_json_windows", TEST_QUICK, 5000, test_config_json_windows},
    {"config_json_rope", TEST_QUICK, 5000, test_config_json_rope},
    {"config_json_names_every_lie", TEST_QUICK, 5000, test_config_json_names_every_lie},
    {"config_names", TEST_QUICK, 5000, test_config_names},
    {"config_json_syntax", TEST_QUICK, 5000, test_config_json_syntax},
    {"config_gguf_families", TEST_QUICK, 5000, test_config_gguf_families},
    {"config_gguf_names_every_lie", TEST_QUICK, 5000, test_config_gguf_names_every_lie},
    {"config_gguf_unusual", TEST_QUICK, 5000, test_config_gguf_unusual},
    {"config_default_target", TEST_QUICK, 5000, test_config_default_target},
    {0},
};
