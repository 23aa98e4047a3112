/* SPDX-License-Identifier: Apache-2.0 */
/* What the profiler plugin tells a tracer. The mirror is usdt.py; tests/plugin compares the two.
 *
 * USDT provider `lanterne`, in libnccl-profiler-lanterne.so:
 *
 *   comm_init(hash, rank, n_ranks, n_nodes, name)    name: C string, may be NULL
 *   op_done(op, bytes)                               struct lanterne_op *, sizeof(*op); with func
 *                                                    LANTERNE_FUNC_PEER_WAIT a sum, see below
 *   p2p_task(hash, rank, seq, peer, bytes, is_send)  each send and receive, when it is launched
 *   comm_end(hash, rank, finished, dropped)
 *
 * Every probe has a semaphore. While that of op_done is 0 the plugin keeps no events, and unless
 * LANTERNE_PROFILER=always it asks NCCL for none, so that a GPU kernel writes no timestamps.
 * comm_init has come and gone when a tracer attaches late: op_done repeats the identity.
 *
 * All times are nanoseconds of CLOCK_MONOTONIC. The pointer of op_done is to the stack of the
 * thread that reports: read it in the probe. */
#ifndef LANTERNE_USDT_H
#define LANTERNE_USDT_H

#include <stddef.h>
#include <stdint.h>

#define LANTERNE_OP_VERSION 1

#define LANTERNE_U_PARTIAL   (1 << 0) /* fewer channels reported than NCCL had announced */
#define LANTERNE_U_NO_STOP   (1 << 1) /* no usable stop timestamp: stop_ns is 0 */
#define LANTERNE_U_GRAPH     (1 << 2) /* replay of a captured graph */
#define LANTERNE_U_LIMITED   (1 << 3) /* only the first channels were watched: stop_ns is early */
#define LANTERNE_U_SEQ_LOCAL (1 << 4) /* seq is a count of this process, not the same on all ranks */
#define LANTERNE_U_NO_SIZE   (1 << 5) /* the data type is unknown: bytes are 0 */

/* func: ncclFunc_t of NCCL 2.29 and later, and two of our own. */
#define LANTERNE_FUNC_P2P_GROUP 34  /* the sends and receives of one launch */
#define LANTERNE_FUNC_UNKNOWN   255

/* Not an operation: about twice a second, for each peer that this rank has received from in groups
 * of sends and receives, on communicators of at most 64 ranks. seq: channels that have received
 * from it since this was last told; bytes_received: nanoseconds from the group's start until these
 * had all of it, summed; peer: the sender; start_ns and stop_ns: from and until when. */
#define LANTERNE_FUNC_PEER_WAIT 253

/* One operation that the GPU has left. 96 bytes. */
struct lanterne_op {
  uint64_t comm_hash;
  uint64_t seq;            /* collective: n-th of its func on this communicator, from 0, by NCCL;
                              p2p: n-th group of the communicator; see the flags GRAPH and SEQ_LOCAL */
  uint64_t bytes;          /* count * element size; p2p group: sent to all peers */
  uint64_t bytes_received; /* p2p group only */
  uint64_t start_ns;       /* the first watched channel entered the operation */
  uint64_t stop_ns;        /* the last watched channel left it */
  int64_t offset_ns;       /* CLOCK_MONOTONIC - GPU timer, as used for both */
  uint64_t enqueue_ns;     /* the host launched it: inside the call that did */
  uint32_t rank;
  uint32_t n_ranks;
  int32_t peer;            /* root or peer; -1: none, or many */
  uint32_t dropped;        /* operations of this communicator that were not reported so far */
  uint16_t channels;       /* seen */
  uint16_t channels_expected; /* announced, after the limit; 0: unknown */
  uint16_t part;           /* p2p: one group was launched in several parts, from 0; same seq */
  uint16_t tasks;          /* p2p: sends and receives in this part; collective: 1 */
  uint8_t func;
  uint8_t dtype;           /* ncclDataType_t; 255: unknown, or several */
  uint8_t flags;           /* LANTERNE_U_* */
  uint8_t version;         /* LANTERNE_OP_VERSION */
  uint32_t reserved;
};

_Static_assert(offsetof(struct lanterne_op, seq) == 8, "usdt.py");
_Static_assert(offsetof(struct lanterne_op, bytes_received) == 24, "usdt.py");
_Static_assert(offsetof(struct lanterne_op, start_ns) == 32, "usdt.py");
_Static_assert(offsetof(struct lanterne_op, stop_ns) == 40, "usdt.py");
_Static_assert(offsetof(struct lanterne_op, enqueue_ns) == 56, "usdt.py");
_Static_assert(offsetof(struct lanterne_op, rank) == 64, "usdt.py");
_Static_assert(offsetof(struct lanterne_op, channels) == 80, "usdt.py");
_Static_assert(offsetof(struct lanterne_op, func) == 88, "usdt.py");
_Static_assert(offsetof(struct lanterne_op, version) == 91, "usdt.py");
_Static_assert(sizeof(struct lanterne_op) == 96, "usdt.py");

#endif
