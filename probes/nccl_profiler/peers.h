/* SPDX-License-Identifier: Apache-2.0 */
/* How long each peer was waited for: sums that are told now and then. */
#ifndef LANTERNE_PEERS_H
#define LANTERNE_PEERS_H

#include "context.h"

/* What is to be told once the lock is released. */
struct peer_report {
  struct peer_wait peers[PEERS_MOST];
  uint64_t hash, since_ns, until_ns;
  int rank, ranks; /* 0 ranks: nothing to tell */
};

unsigned peers_bits(const struct context *c, int peer); /* for the handle of a receive of a group */
void peers_add(struct context *c, unsigned bits, uint64_t ns);      /* with the lock held */
void peers_take(struct context *c, uint64_t now, struct peer_report *report); /* likewise */
void peers_tell(const struct peer_report *report);

#endif
