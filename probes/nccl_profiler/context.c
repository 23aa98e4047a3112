/* SPDX-License-Identifier: Apache-2.0 */
#include "context.h"

#include <stdlib.h>
#include <string.h>

static pthread_mutex_t registry = PTHREAD_MUTEX_INITIALIZER;
static struct context *free_contexts;
static unsigned context_count;

static struct lanterne_open open_here __attribute__((section("lanterne_open"), used)) = {
    LANTERNE_OPEN_MAGIC, LANTERNE_OPEN_VERSION, NULL};

static struct context *context_new(unsigned capacity) {
  if (context_count == MAX_CONTEXTS) return NULL;
  struct context *c = calloc(1, sizeof(*c));
  if (!c) return NULL;
  c->slots = aligned_alloc(SLOT_BYTES, (size_t)capacity * SLOT_BYTES);
  if (!c->slots) {
    free(c);
    return NULL;
  }
  c->capacity = capacity;
  pthread_mutex_init(&c->lock, NULL);
  c->made_before = open_here.newest;
  __atomic_store_n(&open_here.newest, c, __ATOMIC_RELEASE);
  context_count++;
  return c;
}

static void renew(struct context *c, uint64_t hash, int rank, int ranks) {
  c->hash = hash;
  c->rank = rank;
  c->ranks = ranks;
  c->calibration = (struct calibration){0};
  c->finished = c->dropped = c->passed = 0;
  memset(&c->done_enqueue, 0, sizeof(c->done_enqueue));
  memset(c->peers, 0, sizeof(c->peers));
  c->peers_since_ns = 0;
  numbering_reset(&c->numbering);
  c->live = true;
}

struct context *context_take(uint64_t hash, int rank, int ranks, unsigned capacity) {
  pthread_mutex_lock(&registry);
  struct context *c = free_contexts;
  if (c) {
    free_contexts = c->next_free;
  } else {
    c = context_new(capacity);
  }
  pthread_mutex_unlock(&registry);
  if (!c) return NULL;
  pthread_mutex_lock(&c->lock);
  renew(c, hash, rank, ranks);
  pthread_mutex_unlock(&c->lock);
  return c;
}

void context_give(struct context *c) {
  pthread_mutex_lock(&registry);
  c->next_free = free_contexts;
  free_contexts = c;
  pthread_mutex_unlock(&registry);
}

/* First in, first out: a slot's generation comes round as late as it can. */
static struct op *slot_take(struct context *c) {
  struct op *op = c->free_first;
  if (op) {
    c->free_first = op->newer;
    if (!c->free_first) c->free_last = NULL;
    return op;
  }
  if (c->used == c->capacity) return NULL;
  op = &c->slots[c->used++];
  memset(op, 0, sizeof(*op));
  op->owner = c;
  return op;
}

struct op *op_take(struct context *c, uint64_t now) {
  struct op *op = slot_take(c);
  if (!op) return NULL;
  op->out = (struct lanterne_op){.comm_hash = c->hash,
                                 .enqueue_ns = now,
                                 .rank = (uint32_t)c->rank,
                                 .n_ranks = (uint32_t)c->ranks,
                                 .peer = -1,
                                 .func = LANTERNE_FUNC_UNKNOWN,
                                 .dtype = 255,
                                 .version = LANTERNE_OP_VERSION};
  op->gpu_start = op->gpu_stop = 0;
  op->active_ns = now;
  op->expected = op->started = op->done = op->bad_stops = 0;
  op->limit = UINT16_MAX;
  op->stopped = op->self_only = false;
  op->open = true;
  op->newer = NULL;
  op->older = c->newest;
  if (c->newest) c->newest->newer = op;
  c->newest = op;
  if (!c->oldest) c->oldest = op;
  return op;
}

void op_give(struct context *c, struct op *op) {
  *(op->older ? &op->older->newer : &c->oldest) = op->newer;
  *(op->newer ? &op->newer->older : &c->newest) = op->older;
  op->open = false;
  op->generation = (op->generation + 1) & 31;
  op->older = op->newer = NULL;
  if (c->free_last) c->free_last->newer = op;
  c->free_last = op;
  if (!c->free_first) c->free_first = op;
}

struct op *op_find(struct context *c, const void *handle) {
  uintptr_t at = (uintptr_t)slot_of(handle), first = (uintptr_t)c->slots;
  if (!is_slot(handle) || at < first || at >= first + (uintptr_t)c->used * SLOT_BYTES) return NULL;
  struct op *op = slot_of(handle);
  return op->open && op->generation == ((uintptr_t)handle >> 3 & 31) ? op : NULL;
}

void *handle_of(const struct op *op, enum kind kind) {
  return (void *)((uintptr_t)op | (uintptr_t)op->generation << 3 | kind);
}

void *handle_number(uint64_t number, enum kind kind) {
  return (void *)(uintptr_t)(number << 8 | kind);
}
