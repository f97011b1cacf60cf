/* Eight kinds of prompts, for benches of speculation: how much a draft gains depends on what is
 * written. Fixed here, so that figures can be compared between machines and commits. */
#include "cmd/bench_kinds.h"

#include <string.h>

#define ARTICLE                                                                                    \
    "The city council of Harrow Bay voted on Tuesday to rebuild the old fish market on the north " \
    "quay. The building, which opened in 1911, has stood empty since a storm tore off a part of "  \
    "its roof nine years ago. Under the plan, the brick walls and the clock tower will be kept, "  \
    "while the roof and the floor will be replaced by a steel and glass structure. The ground "    \
    "floor will hold forty stalls for fishermen and farmers from the region, and the upper floor " \
    "a small museum of the harbour and a restaurant. Work is to begin in April and to take "       \
    "eighteen months. The cost of eleven million is shared between the city, the county and a "    \
    "private foundation. Some residents asked for a car park instead; the mayor replied that the " \
    "quay has two car parks already, both of them half empty on most days. A group of fishermen "  \
    "welcomed the vote, but said that the rent of a stall must stay below that of the wholesale "  \
    "hall, or few of them could afford to come back."

const struct bench_kind bench_kinds[] = {
    {"chat", "I have moved to a new city and I find it hard to meet people. What could I do in the "
             "next few weeks?"},
    {"code", "Write a Python class Stack with the methods push, pop, peek and is_empty. Add "
             "docstrings and a short example of its use."},
    {"summary", "Summarize the following text in three sentences.\n\n" ARTICLE},
    {"edit", "Repeat the following text word for word, but replace \"Harrow Bay\" by \"Port "
             "Ellen\" wherever it stands.\n\n" ARTICLE},
    {"list", "List fifteen things to check before a long bicycle tour, one a line, each with a "
             "short reason."},
    {"translation",
     "Translate into French:\n\nGood morning. I would like to book a table for four "
     "people on Friday evening. We would like to sit near the window. One of us does "
     "not eat meat. Can you tell me whether you have a menu in English?"},
    {"maths",
     "A train leaves at 9:40 and travels 210 kilometres at 84 kilometres an hour. It stops "
     "for 12 minutes on the way. When does it arrive? Show each step."},
    {"story", "Write a short story about a lighthouse keeper who finds a letter in a bottle."},
    {0},
};

bool bench_kind_exists(const char *name) {
    for (int i = 0; bench_kinds[i].name; i++)
        if (!strcmp(bench_kinds[i].name, name)) return true;
    return false;
}
