/* SPDX-License-Identifier: Apache-2.0 */
#include "number.h"

#include <string.h>

#include "context.h"

/* In the 56 bits of a call's handle: 28 of the call, 27 of the group, and whether it is captured. */
enum { CALL_BITS = 28, GROUP_BITS = 27 };
#define CALL_MASK (((uint64_t)1 << CALL_BITS) - 1)
#define GROUP_MASK (((uint64_t)1 << GROUP_BITS) - 1)

static _Atomic uint64_t groups, calls; /* of the process */

void numbering_reset(struct numbering *n) {
  atomic_store(&n->group, 0);
  atomic_store(&n->count, 0);
  n->seq = n->first = n->replays = 0;
  n->part = 0;
  n->launched = n->captured = false;
}

void *number_group(void) {
  uint64_t number = atomic_fetch_add_explicit(&groups, 1, memory_order_relaxed) + 1;
  return handle_number(number, KIND_GROUP_API);
}

/* Only the thread that now uses the communicator comes here: relaxed is enough. */
static uint64_t count(struct numbering *n, uint64_t group) {
  uint64_t counted = atomic_load_explicit(&n->count, memory_order_relaxed);
  if (group && group == atomic_load_explicit(&n->group, memory_order_relaxed)) return counted - 1;
  atomic_store_explicit(&n->group, group, memory_order_relaxed);
  atomic_store_explicit(&n->count, counted + 1, memory_order_relaxed);
  return counted;
}

void *number_call(struct numbering *n, const void *group, bool captured) {
  bool known = group && kind_of(group) == KIND_GROUP_API;
  uint64_t call = atomic_fetch_add_explicit(&calls, 1, memory_order_relaxed) & CALL_MASK;
  uint64_t seq = captured ? 0 : count(n, known ? number_of(group) : 0);
  uint64_t both = call | (seq & GROUP_MASK) << CALL_BITS;
  return handle_number(both | (uint64_t)captured << (CALL_BITS + GROUP_BITS), KIND_P2P_API);
}

bool number_quiet(struct numbering *n, uint64_t group) {
  uint64_t before = atomic_load_explicit(&n->group, memory_order_relaxed);
  count(n, group);
  return before != group;
}

/* The sequence number goes on beyond 27 bits: what is meant is the one closest below the count. */
static uint64_t widen(struct numbering *n, uint64_t low) {
  uint64_t counted = atomic_load_explicit(&n->count, memory_order_relaxed);
  return counted ? counted - 1 - ((counted - 1 - low) & GROUP_MASK) : low;
}

struct launch number_launch(struct numbering *n, const void *parent) {
  bool called = parent && kind_of(parent) == KIND_P2P_API;
  uint64_t first = called ? number_of(parent) & CALL_MASK : 0;
  bool captured = called && number_of(parent) >> (CALL_BITS + GROUP_BITS);
  uint64_t seq;
  if (!called) {
    seq = count(n, 0);
  } else if (captured) {
    seq = n->replays;
  } else {
    seq = widen(n, number_of(parent) >> CALL_BITS & GROUP_MASK);
  }
  /* The same group again, but beginning with another call: its next plan. A replay of a group of
   * several plans counts each as a group, the same on every replay. */
  bool more = called && !captured && n->launched && !n->captured && n->seq == seq &&
              n->first != first;
  n->part = more ? n->part + 1 : 0;
  n->seq = seq;
  n->first = first;
  n->launched = true;
  n->captured = captured;
  if (captured) n->replays++;
  return (struct launch){.seq = seq, .part = n->part, .captured = captured, .local = captured};
}
