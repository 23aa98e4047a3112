/* SPDX-License-Identifier: Apache-2.0 */
/* One communicator and its pool of operations.
 *
 * Neither is ever freed, only used again, so a handle can always be looked at: NCCL's proxy thread
 * may stop an event after the communicator is gone. A handle is the slot's address with the kind
 * and a generation in its low bits; a slot that was given back has moved on to another generation,
 * and what comes with the old one is ignored. Above the address (48 bits) is the peer that a task of
 * a group receives from, plus one; 0: none, or not of interest. */
#ifndef LANTERNE_CONTEXT_H
#define LANTERNE_CONTEXT_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "clock.h"
#include "lanterne_usdt.h"
#include "number.h"
#include "open.h"

enum { SLOT_BYTES = 256, MAX_CONTEXTS = 4096, PEERS_MOST = 64, PEER_SHIFT = 48 };

/* What a handle stands for. The last four are no slots, only numbers in a pointer. */
enum kind {
  KIND_OP,        /* a collective, or a send or receive without a group */
  KIND_GROUP,     /* one plan; its slot holds the plan's sends and receives */
  KIND_MEMBER,    /* a send or receive of a group: the group's slot */
  KIND_KERNEL,    /* one channel of an operation: the operation's slot */
  KIND_GROUP_API,
  KIND_P2P_API,
  KIND_QUIET,     /* a plan that began while nobody listened */
  KIND_CAPTURED,  /* a collective call that is being captured */
};

struct context;

struct op {
  struct lanterne_op out; /* filled as far as known; times come last */
  struct context *owner;
  struct op *older, *newer; /* open operations by age; `newer` also links free slots */
  uint64_t gpu_start, gpu_stop;
  uint64_t active_ns; /* host time of the last event */
  unsigned expected;  /* channels that will report; 0: unknown */
  unsigned started, done, bad_stops;
  unsigned limit;     /* channels to watch at most */
  uint8_t generation;
  bool open, stopped, self_only;
} __attribute__((aligned(SLOT_BYTES)));
_Static_assert(sizeof(struct op) == SLOT_BYTES, "the low eight bits of a handle are free");
_Static_assert(offsetof(struct op, owner) == 96, "open_memory.py");
_Static_assert(offsetof(struct op, newer) == 112, "open_memory.py");
_Static_assert(offsetof(struct op, active_ns) == 136, "open_memory.py");
_Static_assert(offsetof(struct op, started) == 148, "open_memory.py");
_Static_assert(offsetof(struct op, open) == 165, "open_memory.py");

/* How long receives of groups took since it was last told, by sender. */
struct peer_wait {
  uint64_t wait_ns;
  uint32_t receives;
};

struct context {
  struct context *made_before; /* from here to `live` it is read from outside, see open.h */
  uint64_t hash;
  struct op *oldest, *newest;
  int rank, ranks;
  struct {
    uint64_t latest, earlier, settled, since_ns; /* see settle.c */
  } done_enqueue;
  bool live;
  pthread_mutex_t lock; /* held for a few dozen instructions, never around a probe */
  struct context *next_free;
  struct op *slots;
  unsigned capacity, used; /* slots beyond `used` were never touched */
  struct op *free_first, *free_last;
  int version;
  _Atomic(_Atomic int *) mask;
  struct calibration calibration;
  uint64_t finished, dropped;
  uint64_t passed; /* the plan whose loss was counted last */
  struct numbering numbering;
  struct peer_wait peers[PEERS_MOST];
  uint64_t peers_since_ns; /* when they were told last */
};
_Static_assert(offsetof(struct context, hash) == 8, "open_memory.py");
_Static_assert(offsetof(struct context, oldest) == 16, "open_memory.py");
_Static_assert(offsetof(struct context, rank) == 32, "open_memory.py");
_Static_assert(offsetof(struct context, done_enqueue) == 40, "open_memory.py");
_Static_assert(offsetof(struct context, live) == 72, "open_memory.py");

struct context *context_take(uint64_t hash, int rank, int ranks, unsigned capacity);
void context_give(struct context *c);

/* All with the lock held. */
struct op *op_take(struct context *c, uint64_t now);
void op_give(struct context *c, struct op *op);
struct op *op_find(struct context *c, const void *handle); /* NULL: not of c, or no longer open */

void *handle_of(const struct op *op, enum kind kind);
void *handle_number(uint64_t number, enum kind kind); /* 56 bits */
static inline enum kind kind_of(const void *handle) { return (enum kind)((uintptr_t)handle & 7); }
static inline uint64_t number_of(const void *handle) { return (uintptr_t)handle >> 8; }
static inline struct op *slot_of(const void *handle) {
  uintptr_t address = (uintptr_t)handle & (((uintptr_t)1 << PEER_SHIFT) - 1);
  return (struct op *)(address & ~(uintptr_t)(SLOT_BYTES - 1));
}
static inline unsigned peer_bits(const void *handle) { return (uintptr_t)handle >> PEER_SHIFT; }
static inline void *with_peer(void *handle, unsigned bits) {
  return (void *)((uintptr_t)handle | (uintptr_t)bits << PEER_SHIFT);
}
static inline bool is_slot(const void *handle) {
  return (uintptr_t)handle >= SLOT_BYTES && kind_of(handle) <= KIND_KERNEL;
}

#endif
