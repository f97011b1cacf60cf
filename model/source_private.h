#ifndef TANDEM_MODEL_SOURCE_PRIVATE_H
#define TANDEM_MODEL_SOURCE_PRIVATE_H

/* What the files of model/source share: source.c opens and answers, source_tensors.c maps roles to
 * tensors and checks them, source_template.c finds the chat template. */

#include "base/arena.h"
#include "model/gguf.h"
#include "model/safetensors.h"
#include "model/source.h"

struct model_source {
    const char *path;
    const char *folder; /* Hugging Face; NULL for a GGUF */
    struct gguf *gguf;
    struct safetensors *tensors;   /* NULL for a GGUF, or where only a config.json is there */
    enum kern_dtype planned_dtype; /* of weights that are not there */
    bool plan;                     /* tensors need not be there */
    bool dummy;                    /* and are made up where they are */
    enum kern_dtype dummy_type;    /* of all matrices; KERN_N_DTYPES: as they would be */
    bool has_weights;
    struct model_config config;
    struct arena arena; /* path, names, views, template */
    struct tensor_view *views;
    size_t n_views, n_own;    /* the model's own come first */
    int slot[TENSOR_N_ROLES]; /* place among the own ones, or inside a layer; -1: none */
    int n_layer_roles;
    uint64_t n_params;
    size_t bytes;
    uint64_t fingerprint;
    int32_t *head_ids; /* [config.n_head]; NULL: all */
    uint64_t embedding_hash;
    const char *chat_template;
    size_t chat_template_bytes;
};

/* Fill s->views from the config and the opened file; check that nothing is missing, misshapen or
 * left over. */
int source__map_tensors(struct model_source *s, struct err *e);

/* Fill s->chat_template, NULL where there is none. */
int source__find_template(struct model_source *s, struct err *e);

#endif
