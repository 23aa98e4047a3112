/* SPDX-License-Identifier: Apache-2.0 */
/* The USDT probes. A semaphore counts the tracers of its probe, and guards the set-up of arguments. */
#ifndef LANTERNE_PROBES_H
#define LANTERNE_PROBES_H

#include <stdbool.h>

#include "lanterne_usdt.h"

/* Written by the kernel or a tracer, in this process's copy of the page. */
extern volatile unsigned short lanterne_comm_init_semaphore;
extern volatile unsigned short lanterne_op_done_semaphore;
extern volatile unsigned short lanterne_p2p_task_semaphore;
extern volatile unsigned short lanterne_comm_end_semaphore;

static inline bool armed(void) { return __builtin_expect(lanterne_op_done_semaphore != 0, 0); }

void tell_init(uint64_t hash, int rank, int ranks, int nodes, const char *name);
void tell_op(const struct lanterne_op *op);
void tell_p2p(const struct lanterne_op *op, int peer, uint64_t bytes, bool send);
void tell_end(uint64_t hash, int rank, uint64_t finished, uint64_t dropped);

#endif
