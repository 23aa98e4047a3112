/* Which rank sends how many tokens to which expert: a pure function of a few numbers, in integer
 * arithmetic, so that a test can work out the exact byte counts (rig.py has the same function). */
#ifndef RIG_JOB_ROUTING_H
#define RIG_JOB_ROUTING_H

#include <stdint.h>

struct routing {
  int ranks, experts, topk, tokens;
  double zipf;
  uint64_t seed;
  int hotExpert; /* -1: none */
  double hotFactor;
};

/* counts[rank * experts + expert]: token copies, at most one per token and expert. */
void routingCounts(const struct routing *r, uint64_t step, uint64_t layer, int hot,
                   int64_t *counts);

#endif
