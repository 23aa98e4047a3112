/* SPDX-License-Identifier: Apache-2.0 */
/* The sequence number of a p2p group, which NCCL does not give.
 *
 * All ranks that take part in a p2p group make it in the same order, so the n-th outermost group
 * with a send or receive on a communicator is the same on all of them. It is counted where the call
 * is made, also while nobody listens. NCCL carries our numbers from the call to the launch in the
 * handles. It may launch one group as several plans: same number, next part. A captured group is
 * counted at each replay instead: its call has happened once only. */
#ifndef LANTERNE_NUMBER_H
#define LANTERNE_NUMBER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct numbering {
  _Atomic uint64_t group, count; /* the newest outermost group with p2p; how many there were */
  /* The launch that came last; under the context's lock. */
  uint64_t seq, first, replays;
  uint16_t part;
  bool launched, captured;
};

struct launch {
  uint64_t seq;
  uint16_t part;
  bool captured, local;
};

void numbering_reset(struct numbering *n);

void *number_group(void); /* an outermost group begins: its handle */
void *number_call(struct numbering *n, const void *group, bool captured); /* a send or receive */
/* v4: a task of plan `group`, launched while nobody listens; true: the plan's first. */
bool number_quiet(struct numbering *n, uint64_t group);

/* The first task of a plan; `parent` is what number_call gave, or with v4 the plan. */
struct launch number_launch(struct numbering *n, const void *parent);

#endif
