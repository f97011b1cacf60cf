#ifndef TANDEM_MODEL_CHAT_H
#define TANDEM_MODEL_CHAT_H

/* Chat templates as C renderers of the known families, recognised by marks in the template's text.
 * An unknown template is an error that names what was looked for; raw prompts go on working. */

#include <stdbool.h>
#include <stddef.h>

#include "model/tokenizer.h"

struct chat_message {
    const char *role; /* "system", "user", "assistant" (also "tool" where the family has it) */
    const char *content;
    size_t content_bytes;
};

struct chat_family; /* static table inside chat.c */

/* The family that `template_text` belongs to. E_UNSUPPORTED with the known names. */
int chat_family_detect(const struct chat_family **out, const char *template_text, size_t n,
                       struct err *e);

/* The family called `name` ("chatml", "llama3", "mistral-v3", ...). E_NOT_FOUND with the
 * list. */
int chat_family_find(const struct chat_family **out, const char *name, struct err *e);

const char *chat_family_name(const struct chat_family *f);

/* Render messages into token ids. Only the template's own marks become special tokens; contents are
 * encoded as plain text, so "<|im_end|>" typed by a user stays text. add_generation_prompt opens
 * the assistant's turn. E_INVALID for a role or an order that the family has no place for. */
int chat_render(const struct chat_family *f, const struct tokenizer *t,
                const struct chat_message *messages, size_t n_messages, bool add_generation_prompt,
                struct tokens *out, struct err *e);

#endif
