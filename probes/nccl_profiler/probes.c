/* SPDX-License-Identifier: Apache-2.0 */
#include "probes.h"

/* Arguments are in registers or constant, so that a reader needs no more than the registers. */
#define STAP_SDT_ARG_CONSTRAINT nr
#define _SDT_HAS_SEMAPHORES 1
#include <sys/sdt.h>

/* From 6.18 on the kernel replaces a uprobe's trap by a call, if the probed instruction is this one
 * five-byte nop; sdt.h would put a nop of one byte. No commas: the text goes through macros. */
#if defined(__x86_64__)
#undef _SDT_NOP
#define _SDT_NOP .byte 0x0f; .byte 0x1f; .byte 0x44; .byte 0; .byte 0
#endif

#define SEMAPHORE __attribute__((section(".probes"), visibility("hidden"), used))
SEMAPHORE volatile unsigned short lanterne_comm_init_semaphore = 0;
SEMAPHORE volatile unsigned short lanterne_op_done_semaphore = 0;
SEMAPHORE volatile unsigned short lanterne_p2p_task_semaphore = 0;
SEMAPHORE volatile unsigned short lanterne_comm_end_semaphore = 0;

/* Not inlined: one site a probe. Aligned: a nop across two pages would not be replaced. */
#define SITE __attribute__((noinline, aligned(32)))

SITE void tell_init(uint64_t hash, int rank, int ranks, int nodes, const char *name) {
  if (!lanterne_comm_init_semaphore) return;
  STAP_PROBE5(lanterne, comm_init, hash, rank, ranks, nodes, name);
}

SITE void tell_op(const struct lanterne_op *op) {
  if (!lanterne_op_done_semaphore) return;
  STAP_PROBE2(lanterne, op_done, op, sizeof(*op));
}

SITE void tell_p2p(const struct lanterne_op *op, int peer, uint64_t bytes, bool send) {
  if (!lanterne_p2p_task_semaphore) return;
  uint64_t hash = op->comm_hash, seq = op->seq;
  uint32_t rank = op->rank;
  int sends = send;
  STAP_PROBE6(lanterne, p2p_task, hash, rank, seq, peer, bytes, sends);
}

SITE void tell_end(uint64_t hash, int rank, uint64_t finished, uint64_t dropped) {
  if (!lanterne_comm_end_semaphore) return;
  STAP_PROBE4(lanterne, comm_end, hash, rank, finished, dropped);
}
