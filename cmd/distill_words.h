#ifndef TANDEM_CMD_DISTILL_WORDS_H
#define TANDEM_CMD_DISTILL_WORDS_H

/* Private to `tandem distill`: what made facts are put together from. None of it is a wording of
 * `tandem eval` (tests/test_distill_texts.c holds the two apart). */

#include <stdint.h>

struct distill_words {
    uint32_t n;
    const char *const *at;
};

extern const struct distill_words distill_onsets, distill_nuclei, distill_codas;
extern const struct distill_words distill_first_names, distill_family_names, distill_titles;
extern const struct distill_words distill_towns, distill_firms, distill_projects;
extern const struct distill_words distill_nouns, distill_adjectives, distill_objects;
extern const struct distill_words distill_animals, distill_jobs, distill_colours, distill_materials;
extern const struct distill_words distill_foods, distill_days, distill_months;
extern const struct distill_words distill_coins, distill_units;
extern const struct distill_words distill_code_shapes; /* "AA-000": A a letter, 0 a digit */

/* ---- Wordings ---- */

/* Something that a key has: kinds of both as distill_facts.c's `value` has them. */
struct distill_attribute {
    const char *name;
    char key, value;
};
extern const struct distill_attribute distill_attributes[];
extern const uint32_t distill_n_attributes;

/* Frames with {K}, {A}, {V}: key, attribute, value. */
extern const struct distill_words distill_statements, distill_questions, distill_answers;

/* What happened, one or two questions about it, and the value that answers them. Slots are {kind}
 * or {kind digit}. */
struct distill_event {
    const char *text, *question[2], *value;
};
extern const struct distill_event distill_events[];
extern const uint32_t distill_n_events;

/* ---- Prompts ---- */

/* How a made prompt is framed: in front of the text, between it and the question, behind that; with
 * `reply`, the question comes in a turn of its own, after the assistant said that. */
struct distill_frame {
    const char *head, *middle, *end, *reply;
};
extern const struct distill_frame distill_frames[];
extern const uint32_t distill_n_frames;

/* What asks for more of the text. */
extern const struct distill_words distill_continuations;

/* Frames of a question how the text goes on, %s: the beginning of one of its sentences. */
extern const struct distill_words distill_completions;

#endif
