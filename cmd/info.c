/* `tandem info`: what is in a model file, from its headers alone. */
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "cmd/cmd.h"
#include "cmd/options.h"
#include "cmd/text.h"
#include "model/source.h"

static const char *const scaling_names[] = {"none", "linear", "llama3", "yarn"};

static void print_config(const struct model_source *src) {
    const struct model_config *c = model_source_config(src);
    printf("architecture       %s\nname               %s\n", c->arch, c->name);
    printf("parameters         %llu\n", (unsigned long long)model_source_n_params(src));
    printf("weights            %s (%zu bytes)\n", cmd_bytes((double)model_source_bytes(src)),
           model_source_bytes(src));
    printf("layers             %d\nhidden             %d\nffn                %d\n", c->n_layers,
           c->hidden, c->ffn);
    printf("heads              %d query, %d key-value, of %d\n", c->n_heads, c->n_kv_heads,
           c->head_dim);
    printf("vocabulary         %d rows%s\n", c->vocab,
           c->tied ? ", head tied to the embedding" : "");
    printf("context            %d tokens\n", c->context);
    printf("rope               base %.10g, %d dims, %s pairs, scaling %s", c->rope_base,
           c->rope_dim, c->rope_interleaved ? "interleaved" : "half-split",
           scaling_names[c->rope_scaling]);
    if (c->rope_scaling != ROPE_NONE) printf(" x %g", c->rope_factor);
    int n_skip = 0;
    for (int i = 0; i < c->n_layers; i++) n_skip += c->rope_skip[i];
    if (n_skip) printf(", none in %d layers", n_skip);
    printf("\nextras             %s%s%s\n", c->qkv_bias ? "QKV bias " : "",
           c->qk_norm ? "QK norm " : "", !c->qkv_bias && !c->qk_norm ? "none" : "");
    size_t heads = 2 * (size_t)c->n_layers * (size_t)c->n_kv_heads; /* K and V */
    size_t kv = heads * kern_kv_token_bytes(KERN_F16, c->head_dim);
    printf("KV                 %s a token in f16 (2 x layers x KV heads x head dim x 2)",
           cmd_bytes((double)kv));
    kv = heads * kern_kv_token_bytes(KERN_Q8_0, c->head_dim);
    printf(", %s in q8_0\n", cmd_bytes((double)kv));
    printf("fingerprint        %016llx\n", (unsigned long long)model_source_fingerprint(src));
}

/* What a draft says of itself (docs/draft-format.md). */
static void print_draft(const struct model_source *src) {
    const struct model_config *c = model_source_config(src);
    if (c->borrows_embedding)
        printf("embedding          borrowed from its target, XXH3 %016llx\n",
               (unsigned long long)model_source_embedding_hash(src));
    if (!c->borrows_head && c->n_head == c->vocab) return;
    printf("head               %d of %d tokens, rows %s\n", c->n_head, c->vocab,
           c->borrows_head ? "borrowed from its target"
           : c->tied       ? "of the embedding"
                           : "of its own");
}

static void print_types(const struct model_source *src) {
    size_t n[KERN_N_DTYPES] = {0}, bytes[KERN_N_DTYPES] = {0};
    for (size_t i = 0; i < model_source_n_tensors(src); i++) {
        const struct tensor_view *v = model_source_tensor_at(src, i);
        n[v->dtype]++;
        bytes[v->dtype] += v->bytes;
    }
    printf("tensors            %zu:", model_source_n_tensors(src));
    for (int t = 0; t < KERN_N_DTYPES; t++)
        if (n[t])
            printf(" %zu %s (%s)", n[t], kern_dtype_name((enum kern_dtype)t),
                   cmd_bytes((double)bytes[t]));
    printf("\n");
}

static void print_tokenizer(const struct model_source *src, const char *path) {
    struct err e = {0};
    struct tokenizer *t = NULL;
    const struct gguf *g = model_source_gguf(src);
    if (model_source_config(src)->borrows_embedding && !gguf_has(g, "tokenizer.ggml.model")) {
        printf("tokenizer          its target's\n");
        return;
    }
    if (cmd_open_tokenizer(&t, path, &e)) {
        printf("tokenizer          not usable: %s\n", e.message);
        return;
    }
    printf("tokenizer          %d tokens, bos %d%s, fingerprint %016llx\n", tokenizer_n_tokens(t),
           tokenizer_bos(t), tokenizer_adds_bos(t) ? " (added)" : "",
           (unsigned long long)tokenizer_fingerprint(t));
    tokenizer_close(t);
    size_t n;
    const char *text = model_source_chat_template(src, &n);
    const struct chat_family *f = NULL;
    if (!text) printf("chat template      none\n");
    else if (chat_family_detect(&f, text, n, &e)) printf("chat template      %s\n", e.message);
    else printf("chat template      %s\n", chat_family_name(f));
}

int cmd_info(int argc, char **argv) {
    const char *model = NULL;
    bool tensors = false, keys = false;
    const struct option table[] = {
        {OPTION_STRING, "model", NULL, 'm', &model, "PATH", 0, 0,
         "GGUF file or Hugging Face folder", NULL},
        {OPTION_FLAG, "tensors", NULL, 0, &tensors, NULL, 0, 0, "list every tensor", NULL},
        {OPTION_FLAG, "keys", NULL, 0, &keys, NULL, 0, 0, "list every metadata key of a GGUF",
         NULL},
        {0},
    };
    struct options o = {.command = "info",
                        .usage = "tandem info MODEL [options]",
                        .about = "Show what is in a model file, from its headers alone.",
                        .table = table,
                        .max_words = 1};
    int rc = options_parse(&o, argc, argv);
    if (rc >= 0) return rc;
    if (!model && o.n_words) model = o.words[0];
    if (!model) return options_error(&o, "which model?");
    struct err e = {0};
    struct model_source *src;
    rc = model_source_plan_only(&src, model, &e);
    if (rc) return cmd_fail(&e);
    print_config(src);
    print_draft(src);
    print_types(src);
    if (!model_source_has_weights(src))
        printf("note               headers only: the weights are missing or cut off\n");
    print_tokenizer(src, model);
    if (keys && model_source_gguf(src)) {
        char line[512];
        for (size_t i = 0; gguf_describe(model_source_gguf(src), i, line, sizeof line); i++)
            printf("%s\n", line);
    }
    for (size_t i = 0; tensors && i < model_source_n_tensors(src); i++) {
        const struct tensor_view *v = model_source_tensor_at(src, i);
        printf("%-32s %-5s %7d x %-7d %zu bytes\n", v->name, kern_dtype_name(v->dtype), v->rows,
               v->cols, v->bytes);
    }
    model_source_close(src);
    return 0;
}
