/* SPDX-License-Identifier: Apache-2.0 */
/* Which events NCCL is asked for, and when.
 *
 * NCCL gives init the address of its one event mask and reads it again at every call (read in the
 * source of 2.27 to 2.30 and in the binary of 2.32). So while nobody listens the plugin asks for
 * nothing but the calls' own events, and looks at its semaphore there: the GPU writes no timestamps,
 * and captured graphs get no extra host nodes. */
#ifndef LANTERNE_MASK_H
#define LANTERNE_MASK_H

#include <stdatomic.h>

#include "abi.h"
#include "context.h"

/* Below v5 there are no events of calls: plans and their p2p tasks take their place. */
void mask_first(struct context *c, _Atomic int *mask, int version);
void mask_follow(struct context *c); /* as the semaphore says */
void mask_forget(struct context *c); /* the address may end with the communicator */

#endif
