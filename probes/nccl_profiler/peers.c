/* SPDX-License-Identifier: Apache-2.0 */
/* A rank that waits for a group of sends and receives waits for the last of its peers. Which one it
 * is would cost an event a receive; sums cost one a peer and half second, and are what a matrix of
 * waits is made of. They count from the start of the group on this rank, so that a peer that comes
 * late is in them: the collector knows how late it came and takes that off. */
#include "peers.h"

#include "probes.h"

#define TELL_NS 500000000u

unsigned peers_bits(const struct context *c, int peer) {
  return c->ranks <= PEERS_MOST && peer >= 0 && peer < c->ranks ? (unsigned)peer + 1 : 0;
}

void peers_add(struct context *c, unsigned bits, uint64_t ns) {
  if (!bits || bits > PEERS_MOST) return;
  if (!c->peers_since_ns) c->peers_since_ns = host_ns();
  c->peers[bits - 1].wait_ns += ns;
  c->peers[bits - 1].receives++;
}

void peers_take(struct context *c, uint64_t now, struct peer_report *report) {
  report->ranks = 0;
  if (!c->peers_since_ns || now - c->peers_since_ns < TELL_NS) return;
  for (int peer = 0; peer < c->ranks; peer++) {
    report->peers[peer] = c->peers[peer];
    c->peers[peer] = (struct peer_wait){0};
  }
  report->hash = c->hash;
  report->rank = c->rank;
  report->ranks = c->ranks;
  report->since_ns = c->peers_since_ns;
  report->until_ns = now;
  c->peers_since_ns = now;
}

void peers_tell(const struct peer_report *report) {
  for (int peer = 0; peer < report->ranks; peer++) {
    if (!report->peers[peer].receives) continue;
    struct lanterne_op row = {.comm_hash = report->hash,
                              .seq = report->peers[peer].receives,
                              .bytes_received = report->peers[peer].wait_ns,
                              .start_ns = report->since_ns,
                              .stop_ns = report->until_ns,
                              .enqueue_ns = report->until_ns,
                              .rank = (uint32_t)report->rank,
                              .n_ranks = (uint32_t)report->ranks,
                              .peer = peer,
                              .func = LANTERNE_FUNC_PEER_WAIT,
                              .dtype = 255,
                              .version = LANTERNE_OP_VERSION};
    tell_op(&row);
  }
}
