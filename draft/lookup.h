#ifndef TANDEM_DRAFT_LOOKUP_H
#define TANDEM_DRAFT_LOOKUP_H

/* Prompt lookup: where the newest tokens of a sequence occurred before, in prompt or answer, what
 * followed then is proposed now. Costs no model pass; pays for summaries, edits and code. (Saxena
 * 2023, "Prompt lookup decoding".) An index of n-grams, longest first, constant time per token. One
 * index a sequence, in memory of the caller; nothing allocates after init. Only committed tokens
 * are ever indexed, so nothing is rolled back. Any ids will do, negative ones too. */

#include <stddef.h>
#include <stdint.h>

enum {
    DRAFT_LOOKUP_MIN = 2, /* tokens that must match, at least */
    DRAFT_LOOKUP_MAX = 5, /* longest n-gram in the index; longer matches are measured token by token
                             up to DRAFT_LOOKUP_REACH and reported */
    DRAFT_LOOKUP_REACH = 32,
    DRAFT_LOOKUP_PLACES = 8, /* places of the same longest n-gram that are compared, newest first */
};

struct draft_lookup {
    int max_tokens, n_indexed; /* tokens of the sequence; those in the index */
    void *memory;              /* the tables; the caller's */
    uint32_t mask;
    int earlier[DRAFT_LOOKUP_MAX - DRAFT_LOOKUP_MIN + 1]; /* by n: where the newest n-gram ended
                                                             before, plus one; 0: nowhere */
};

/* Bytes of the tables of a sequence of at most max_tokens tokens: 36 to 68 a token. */
size_t draft_lookup_bytes(int max_tokens);

/* memory: draft_lookup_bytes(max_tokens), 8-byte aligned, the caller's, must outlive *l. Clears it,
 * which takes time by max_tokens: give what this sequence may reach, not what memory would hold. */
void draft_lookup_init(struct draft_lookup *l, void *memory, int max_tokens);

/* ids[0..n_tokens) are the sequence's committed tokens now; index what is new. Constant time per
 * new token, about a tenth of a microsecond: a prompt may be given in pieces. Asserts n_tokens <=
 * max_tokens and that it never shrinks. */
void draft_lookup_extend(struct draft_lookup *l, const int32_t *ids, int n_tokens);

/* Propose what followed an earlier occurrence of the longest n-gram that ends ids[0..n_tokens) (all
 * indexed). Writes at most `max` ids to out and returns how many, 0 where nothing of at least
 * DRAFT_LOOKUP_MIN tokens matches. *n_match gets the length of the match, as far as
 * DRAFT_LOOKUP_REACH; so many tokens do match. Up to DRAFT_LOOKUP_MAX the longest match is found
 * and of several the latest. Among longer ones the longest of the newest DRAFT_LOOKUP_PLACES is
 * taken (the latest of equals), so that a common phrase is continued as where more before it agrees
 * too. Hash collisions can only hide a match, and only where 16 other n-grams crowd its place. A
 * proposal that reaches the sequence's end goes on into its own beginning (a loop of period d
 * proposes the loop); out may be &ids[n_tokens]. */
int draft_lookup_propose(const struct draft_lookup *l, const int32_t *ids, int n_tokens, int max,
                         int32_t *out, int *n_match);

#endif
