#ifndef TANDEM_DRAFT_H
#define TANDEM_DRAFT_H

/* Proposers of draft tokens: the draft model, prompt lookup; and how many to propose. Nothing here
 * decides what is emitted: verify and the target do. */

#include "draft/depth.h"
#include "draft/lookup.h"
#include "draft/proposer.h"

#endif
