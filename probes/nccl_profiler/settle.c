/* SPDX-License-Identifier: Apache-2.0 */
/* NCCL stops a Coll or P2p event when it has been launched, and channels report later, or sooner.
 * So an operation is complete when it was stopped and all announced channels have come and gone.
 *
 * Should fewer come than were announced, nothing tells so. But the operations of a communicator
 * run in order: when one that was launched later has been complete for a while, the earlier ones
 * have reported what they ever will. */
#include "settle.h"

#include "options.h"

#include <string.h>

#define STUCK_NS 10000000000u

static uint16_t bounded(unsigned value) { return value < UINT16_MAX ? (uint16_t)value : UINT16_MAX; }

static void describe(const struct context *c, struct op *op) {
  struct lanterne_op *out = &op->out;
  int64_t offset = offset_of(&c->calibration);
  out->offset_ns = offset;
  out->start_ns = op->gpu_start + (uint64_t)offset;
  out->channels = bounded(op->started);
  out->channels_expected = bounded(op->expected);
  out->dropped = (uint32_t)c->dropped;
  if (op->done < op->expected || op->bad_stops) out->flags |= LANTERNE_U_PARTIAL;
  if (op->gpu_stop) {
    out->stop_ns = op->gpu_stop + (uint64_t)offset;
  } else {
    out->flags |= LANTERNE_U_NO_STOP;
  }
}

static void finish(struct context *c, struct op *op, struct outbox *out) {
  if (op->started && out->count < sizeof(out->ops) / sizeof(*out->ops)) {
    c->finished++;
    describe(c, op);
    out->ops[out->count++] = op->out;
  } else if (!op->self_only) {
    c->dropped++;
  }
  op_give(c, op);
}

static bool is_quiet(const struct op *op) { return op->stopped && op->started == op->done; }

static bool is_complete(const struct op *op) {
  if (!is_quiet(op)) return false;
  return op->self_only || (op->expected && op->done >= op->expected);
}

/* `settled` is the launch time of an operation that has been complete for settle_ns. */
static void note(struct context *c, uint64_t enqueue, uint64_t now) {
  if (now - c->done_enqueue.since_ns > options_get()->settle_ns) {
    c->done_enqueue.settled = c->done_enqueue.earlier;
    c->done_enqueue.earlier = c->done_enqueue.latest;
    c->done_enqueue.since_ns = now;
  }
  if (enqueue > c->done_enqueue.latest) c->done_enqueue.latest = enqueue;
}

void settle(struct context *c, struct op *op, uint64_t now, struct outbox *out) {
  if (!is_complete(op)) return;
  uint64_t enqueue = op->out.enqueue_ns;
  bool ran = op->started > 0;
  finish(c, op, out);
  if (ran) note(c, enqueue, now);
  while (c->oldest && out->count < 3 && is_quiet(c->oldest) &&
         c->oldest->out.enqueue_ns < c->done_enqueue.settled) {
    finish(c, c->oldest, out);
  }
}

void settle_stuck(struct context *c, uint64_t now, struct outbox *out) {
  struct op *op = c->oldest;
  if (op && is_quiet(op) && now - op->active_ns > STUCK_NS) finish(c, op, out);
}

void settle_all(struct context *c, struct outbox *out) {
  while (c->oldest && out->count < sizeof(out->ops) / sizeof(*out->ops)) {
    struct op *op = c->oldest;
    /* A channel that is still running has no end: what is known of it would mislead. */
    if (op->started != op->done) op->started = 0;
    finish(c, op, out);
  }
}
