/* SPDX-License-Identifier: Apache-2.0 */
/* When an operation is over, and what is then said of it. All with the context's lock held. */
#ifndef LANTERNE_SETTLE_H
#define LANTERNE_SETTLE_H

#include "context.h"

/* Reported once the lock is released. */
struct outbox {
  struct lanterne_op ops[4];
  unsigned count;
};

void settle(struct context *c, struct op *op, uint64_t now, struct outbox *out); /* if complete */
void settle_stuck(struct context *c, uint64_t now, struct outbox *out); /* the pool is exhausted */
void settle_all(struct context *c, struct outbox *out); /* as many as fit; at the end */

#endif
