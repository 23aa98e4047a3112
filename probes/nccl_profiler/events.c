/* SPDX-License-Identifier: Apache-2.0 */
/* What NCCL reports, turned into operations.
 *
 * The launching thread starts Group, then Coll and P2p, hands the work to the thread that watches
 * the GPU, and stops them; that thread starts and stops one KernelCh for each channel, at any time
 * from then on. NCCL keeps handles without clearing them, so every start must set one, and it
 * starts parents of what it was asked for without being asked. */
#include "events.h"

#include "mask.h"
#include "names.h"
#include "options.h"
#include "peers.h"
#include "probes.h"
#include "settle.h"

static void tell(const struct outbox *out) {
  for (unsigned i = 0; i < out->count; i++) tell_op(&out->ops[i]);
}

static void lock(struct context *c) { pthread_mutex_lock(&c->lock); }
static void unlock(struct context *c) { pthread_mutex_unlock(&c->lock); }

/* NULL where the pool is exhausted: that operation is not seen. */
static struct op *take(struct context *c, struct outbox *out) {
  uint64_t now = host_ns();
  if (!c->live) return NULL;
  struct op *op = op_take(c, now);
  if (op) return op;
  settle_stuck(c, now, out);
  return op_take(c, now);
}

static void *quiet_group(void) { return handle_number(number_of(number_group()), KIND_QUIET); }

/* A plan has no channels of its own, and for collectives no use: it only waits for p2p tasks.
 * Never NULL: NCCL numbers the collectives of a replayed graph only where it holds a handle. */
static void *start_group(struct context *c) {
  struct outbox out = {.count = 0};
  if (c->version < 5) mask_follow(c);
  if (!armed()) return quiet_group();
  lock(c);
  struct op *op = take(c, &out);
  void *handle = NULL;
  if (op) {
    op->self_only = true;
    op->out.func = LANTERNE_FUNC_P2P_GROUP;
    handle = handle_of(op, KIND_GROUP);
  }
  unlock(c);
  tell(&out);
  return handle ? handle : quiet_group();
}

static void set_limit(struct op *op, unsigned channels) {
  unsigned limit = options_get()->channels;
  op->expected = channels;
  if (limit && channels > limit) {
    op->limit = op->expected = limit;
    op->out.flags |= LANTERNE_U_LIMITED;
  }
}

static uint64_t bytes_of(uint64_t count, const char *datatype, struct lanterne_op *out) {
  uint8_t dtype = dtype_of(datatype);
  unsigned size = dtype_bytes(dtype);
  out->dtype = out->tasks && out->dtype != dtype ? DTYPE_UNKNOWN : dtype;
  if (!size) out->flags |= LANTERNE_U_NO_SIZE;
  return count * size;
}

static void *start_coll(struct context *c, const struct descriptor *d) {
  struct outbox out = {.count = 0};
  void *handle = NULL;
  if (!armed()) return NULL;
  lock(c);
  struct op *op = take(c, &out);
  if (op) {
    op->out.seq = d->coll.seq;
    op->out.func = func_of(d->coll.func);
    op->out.bytes = bytes_of(d->coll.count, d->coll.datatype, &op->out);
    op->out.peer = func_has_root(op->out.func) ? d->coll.root : -1;
    op->out.tasks = 1;
    if (c->version >= 5 && d->parent && kind_of(d->parent) == KIND_CAPTURED) {
      op->out.flags |= LANTERNE_U_GRAPH;
    }
    set_limit(op, d->coll.channels);
    handle = handle_of(op, KIND_OP);
  } else if (c->live) {
    c->dropped++;
  }
  unlock(c);
  tell(&out);
  return handle;
}

static void number(struct context *c, struct op *op, const void *parent) {
  struct launch launch = number_launch(&c->numbering, parent);
  op->out.seq = launch.seq;
  op->out.part = launch.part;
  if (launch.captured) op->out.flags |= LANTERNE_U_GRAPH;
  if (launch.local) op->out.flags |= LANTERNE_U_SEQ_LOCAL;
}

static uint64_t add_task(struct context *c, struct op *op, const struct descriptor *d, bool send) {
  uint64_t bytes = bytes_of(d->p2p.count, d->p2p.datatype, &op->out);
  *(send ? &op->out.bytes : &op->out.bytes_received) += bytes;
  if (op->out.tasks < UINT16_MAX) op->out.tasks++;
  /* To itself a rank copies before the launch: no channel will report it. */
  if (d->p2p.peer != c->rank) {
    op->self_only = false;
    op->expected += d->p2p.channels;
  }
  return bytes;
}

static struct op *group_of(struct context *c, const void *group, const struct descriptor *d) {
  struct op *op = kind_of(group) == KIND_GROUP ? op_find(c, group) : NULL;
  if (op && !op->out.tasks) number(c, op, d->parent);
  return op;
}

static struct op *lone(struct context *c, const struct descriptor *d, bool send,
                       struct outbox *out) {
  struct op *op = take(c, out);
  if (!op) {
    if (c->live) c->dropped++;
    return NULL;
  }
  number(c, op, c->version >= 5 ? d->parent : NULL);
  op->self_only = d->p2p.peer == c->rank;
  op->out.func = send ? FUNC_SEND : FUNC_RECV;
  op->out.peer = d->p2p.peer;
  return op;
}

/* A task of a plan that is not kept: it began before anybody listened, or the pool was empty. */
static void pass_by(struct context *c, const void *group) {
  bool first = c->version < 5 && number_quiet(&c->numbering, number_of(group));
  if (!armed()) return;
  lock(c);
  if (c->version >= 5) first = c->passed != number_of(group);
  c->passed = number_of(group);
  if (first) c->dropped++;
  unlock(c);
}

static void *start_p2p(struct context *c, const struct descriptor *d) {
  struct outbox out = {.count = 0};
  const void *group = c->version >= 5 ? d->p2p.group : d->parent;
  void *handle = NULL;
  if (group && kind_of(group) == KIND_QUIET) {
    pass_by(c, group);
    return NULL;
  }
  if (!armed()) return NULL;
  bool send = func_of(d->p2p.func) == FUNC_SEND;
  struct lanterne_op seen;
  uint64_t bytes = 0;
  lock(c);
  struct op *op = group ? group_of(c, group, d) : lone(c, d, send, &out);
  if (op) {
    bytes = add_task(c, op, d, send);
    handle = handle_of(op, group ? KIND_MEMBER : KIND_OP);
    if (group && !send) handle = with_peer(handle, peers_bits(c, d->p2p.peer));
    seen = op->out;
  }
  unlock(c);
  if (handle) tell_p2p(&seen, d->p2p.peer, bytes, send);
  tell(&out);
  return handle;
}

static void *start_kernel(struct context *c, const struct descriptor *d) {
  uint64_t timer = d->kernel.timer;
  void *handle = NULL;
  if (!d->parent || !timer) return NULL;
  uint64_t now = host_ns();
  lock(c);
  calibrate(&c->calibration, now, timer);
  /* A handle of another communicator, or of another process where its proxy serves ours, is not
   * followed: op_find only looks into this pool. */
  struct op *op = op_find(c, d->parent);
  if (op && op->started < op->limit) {
    if (!op->started || timer < op->gpu_start) op->gpu_start = timer;
    op->started++;
    op->active_ns = now;
    handle = with_peer(handle_of(op, KIND_KERNEL), peer_bits(d->parent));
  }
  unlock(c);
  return handle;
}

void *event_start(struct context *c, uint64_t type, const struct descriptor *d) {
  switch (type) {
    case EVENT_GROUP_API: mask_follow(c); return number_group();
    case EVENT_P2P_API: return number_call(&c->numbering, d->parent, d->p2p_api.captured);
    case EVENT_COLL_API:
      return d->coll_api.captured ? handle_number(0, KIND_CAPTURED) : NULL;
    case EVENT_GROUP: return start_group(c);
    case EVENT_COLL: return start_coll(c, d);
    case EVENT_P2P: return start_p2p(c, d);
    case EVENT_KERNEL_CH: return start_kernel(c, d);
    default: return NULL; /* proxy events too: their parent may be an address of another process */
  }
}

static void stop(struct context *c, struct op *op, enum kind kind, struct outbox *out) {
  uint64_t now = op->active_ns; /* a channel's stop follows its timestamp at once */
  if (kind == KIND_KERNEL) {
    if (op->done < op->started) op->done++;
  } else {
    op->stopped = true;
    now = host_ns();
  }
  op->active_ns = now;
  settle(c, op, now, out);
}

void event_stop(void *handle) {
  struct outbox out = {.count = 0};
  struct peer_report report = {.ranks = 0};
  if (!is_slot(handle) || kind_of(handle) == KIND_MEMBER) return;
  struct context *c = slot_of(handle)->owner;
  lock(c);
  struct op *op = op_find(c, handle);
  if (op) stop(c, op, kind_of(handle), &out);
  if (peer_bits(handle)) peers_take(c, host_ns(), &report);
  unlock(c);
  tell(&out);
  peers_tell(&report);
}

void event_state(void *handle, int state, const uint64_t *arguments) {
  if (state != STATE_KERNEL_CH_STOP || !arguments || !is_slot(handle)) return;
  if (kind_of(handle) != KIND_KERNEL) return;
  uint64_t now = host_ns(), timer = arguments[0];
  struct context *c = slot_of(handle)->owner;
  lock(c);
  struct op *op = op_find(c, handle);
  if (op) op->active_ns = now;
  if (op && timer >= op->gpu_start) {
    if (timer > op->gpu_stop) op->gpu_stop = timer;
    peers_add(c, peer_bits(handle), timer - op->gpu_start);
    calibrate(&c->calibration, now, timer);
  } else if (op) {
    op->bad_stops++; /* a zero has been seen on real GPUs */
  }
  unlock(c);
}

void events_end(struct context *c) {
  struct outbox out;
  uint64_t finished, dropped, hash = c->hash;
  int rank = c->rank;
  bool more = true;
  mask_forget(c);
  while (more) {
    out.count = 0;
    lock(c);
    c->live = false;
    settle_all(c, &out);
    more = c->oldest != NULL;
    finished = c->finished;
    dropped = c->dropped;
    unlock(c);
    tell(&out);
  }
  tell_end(hash, rank, finished, dropped);
}
