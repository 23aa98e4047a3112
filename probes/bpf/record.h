/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The kernel records. The mirror is probes/layout.py; tests/contract compares the two.
 *
 * Every record of one ring has the same size, so that user space views the ring's memory as an
 * array: stride = 8 bytes of ring header + sizeof(record). Keep sizes multiples of 8.
 */
#ifndef LANTERNE_RECORD_H
#define LANTERNE_RECORD_H

#define LANTERNE_F_PAIR      (1 << 0) /* duration_ns and rc are valid (entry and return seen) */
#define LANTERNE_F_GROUP     (1 << 1) /* inside ncclGroupStart .. ncclGroupEnd */
#define LANTERNE_F_CAPTURE   (1 << 2) /* recorded into a CUDA graph, not run now */
#define LANTERNE_F_P2P       (1 << 3) /* send or recv: numbered apart from collectives */
#define LANTERNE_F_BLOCKING  (1 << 4) /* the host call returns only when the operation has ended */
#define LANTERNE_F_SYNCED    (1 << 5) /* this thread has returned from a synchronise call before */
#define LANTERNE_F_FIRST     (1 << 6) /* first operation seen on this (process, communicator) */
#define LANTERNE_F_BYTES     (1 << 7) /* count is in bytes, dtype is meaningless */

/* One collective, send or recv call. 80 bytes, stride 88.
 *
 * Entry-only calls (NCCL) are written at entry. Pairs (gloo) are written at return, so they stand
 * in the ring in the order of their ends; a pair that an exception has left goes out without
 * LANTERNE_F_PAIR when its thread makes the next call.
 *
 * gloo::alltoallv writes, at entry, one record per peer (64 at most, itself included) of func
 * Send with the bytes for it, then likewise of func Recv with the bytes from it, flags P2P | BYTES |
 * BLOCKING, with the seq of the collective lane and the probe of the call itself, and a group of
 * its own. The call's record (func AllToAllV, count = all bytes sent) follows at return with the
 * same seq and group, without LANTERNE_F_GROUP.
 *
 * PyTorch's split sizes are a record of func Splits, which is no operation: comm is the process
 * group's object, count the rows that it sends in all, stream those that it receives, peer its rank
 * (-1: not told, the thread's next sends are this call's), seq its size. The peer of a dispatch or combine is the bytes of one token, or, of NCCL EP, its
 * elements; -1: unknown.
 *
 * count follows NCCL's API also for gloo's bytes: per rank for all-gather and gather, per peer for
 * all-to-all and scatter. What could not be read is 0 (count, stream), 255 (dtype), -1 (peer).
 */
struct lanterne_record {
	__u64 enter_ns;        /* CLOCK_MONOTONIC at entry */
	__u64 duration_ns;     /* return - entry; 0 unless F_PAIR */
	__u64 comm;            /* communicator pointer in the process */
	__u64 count;           /* elements as the API counts them; bytes with F_BYTES */
	__u64 stream;
	__u32 tgid;
	__u32 tid;
	__u32 seq;             /* per (tgid, comm) and lane (collective | p2p group), from 0 */
	__u32 group;           /* number of the outermost group, unique on the host; 0: none */
	__s32 peer;            /* root or peer; -1: none */
	__u32 sync_age_us;     /* enter - return of the thread's last synchronise; valid with F_SYNCED */
	__u32 sync_blocked_us; /* time in synchronise calls since the thread's previous record */
	__u16 launches;        /* kernel and graph launches and operations since that synchronise */
	__s16 rc;              /* return code; valid with F_PAIR */
	__u16 probe;           /* catalog row id */
	__u8 func;             /* ncclFunc_t numbering of 2.29+, above 31 ours (layout.Func) */
	__u8 dtype;            /* ncclDataType_t; 255: unknown */
	__u8 flags;
	__u8 top_k;            /* experts per token of a dispatch or combine; 0: unknown */
	__u8 pad[2];
};

/* What happened in a communicator's life. */
#define LANTERNE_C_INIT      1  /* InitRank, Config, Scalable: id, n_ranks, rank known */
#define LANTERNE_C_INIT_ALL  2  /* one record per communicator of the call */
#define LANTERNE_C_SPLIT     3  /* parent, color, key known */
#define LANTERNE_C_SHRINK    4
#define LANTERNE_C_GROW      5
#define LANTERNE_C_DESTROY   6
#define LANTERNE_C_ABORT     7
#define LANTERNE_C_FINALIZE  8
#define LANTERNE_C_REVOKE    9
#define LANTERNE_C_FIRST_USE 10 /* first operation on a communicator; gloo: rank and n_ranks known */
#define LANTERNE_C_CONNECT   11 /* gloo: full mesh connected; name is the store prefix */

#define LANTERNE_CF_ID       (1 << 0) /* id[] is valid */
#define LANTERNE_CF_RANK     (1 << 1) /* rank and n_ranks are valid */
#define LANTERNE_CF_PENDING  (1 << 2) /* *slot was not written yet: read `slot` in the process */
#define LANTERNE_CF_NAME     (1 << 3) /* name[] is valid */

/* Rare and larger. 264 bytes, stride 272.
 *
 * A creation inside a group is told at the return of its call (PENDING while *slot is 0), and again
 * at the return of the outermost ncclGroupEnd if *slot has another value by then. rc != 0: it
 * failed, comm is 0. FIRST_USE of a gloo context has rank and n_ranks; CONNECT has them too, name =
 * the prefixes of its store from root to leaf ("default_pg/0//cpu/"), and of a TCPStore the port in
 * key and the host as text in id[] (without CF_ID).
 */
struct lanterne_comm_event {
	__u64 time_ns;         /* at return of the call (entry for DESTROY, ABORT, REVOKE) */
	__u64 duration_ns;
	__u64 comm;            /* the communicator (new one, for creations); 0 if unknown */
	__u64 parent;          /* split, shrink, grow */
	__u64 slot;            /* address of the ncclComm_t variable that receives the new one */
	__u32 tgid;
	__u32 tid;
	__s32 n_ranks;
	__s32 rank;
	__s32 color;           /* split; shrink: number of excluded ranks */
	__s32 key;             /* split; init_all: index of the communicator in the call */
	__s32 rc;
	__u16 probe;
	__u8 kind;             /* LANTERNE_C_* */
	__u8 flags;            /* LANTERNE_CF_* */
	__u8 id[128];          /* ncclUniqueId, or 8 bytes: hash known by other means */
	char name[64];         /* commName of ncclConfig_t (2.27+), gloo store prefix; NUL-padded */
};

_Static_assert(sizeof(struct lanterne_record) == 80, "layout.RECORD mirrors this");
_Static_assert(sizeof(struct lanterne_comm_event) == 264, "layout.COMM_EVENT mirrors this");

/* What the profiler plugin tells of one operation of the GPU, in a ring of its own. 104 bytes, stride
 * 112. `op` is struct lanterne_op of nccl_profiler/lanterne_usdt.h. */
struct lanterne_device {
	__u32 tgid;
	__u32 tid; /* the thread that told it */
	__u64 op[12];
};

_Static_assert(sizeof(struct lanterne_device) == 104, "layout.DEVICE mirrors this");

/* Reasons of loss; index into the per-CPU counter array, order mirrored in layout.COUNTERS. */
enum lanterne_counter {
	LANTERNE_N_SUBMITTED,       /* records submitted to the main ring */
	LANTERNE_N_COMM_SUBMITTED,  /* records submitted to the communicator ring */
	LANTERNE_N_LOST_RING,       /* main ring full */
	LANTERNE_N_LOST_COMM_RING,  /* communicator ring full */
	LANTERNE_N_LOST_SCRATCH,    /* no room to remember an entry until its return */
	LANTERNE_N_LOST_STATE,      /* no room for a thread's or communicator's state */
	LANTERNE_N_LOST_READ,       /* an argument in user memory could not be read */
	LANTERNE_N_NESTED,          /* inner call of a nested pair, not recorded by design */
	LANTERNE_N_ORPHAN_RETURN,   /* return without an entry: attached in between */
	LANTERNE_N_LOST_CUDA,       /* no room for a process's or thread's CUDA state */
	LANTERNE_N_DEVICE_SUBMITTED, /* records submitted to the device ring */
	LANTERNE_N_LOST_DEVICE_RING, /* device ring full */
	LANTERNE_N_LOST_DEVICE_VERSION, /* told by a plugin of another version than the agent's */
	LANTERNE_N_KERNELS_SUBMITTED, /* records submitted to the ring of kernels */
	LANTERNE_N_LOST_KERNEL_RING, /* ring of kernels full */
	LANTERNE_N_LOST_KERNEL_NAMES, /* no room for one more kernel's name, or for one more process */
	LANTERNE_N_COUNTERS,
};

/* Kinds of stream. The legacy default stream is 0 or 1 at the plain entries; 2 is the per-thread
 * one, and so is 0 at the _ptsz and _ptds entries. */
#define LANTERNE_STREAM_NONE       0 /* the call names none: an event, a context */
#define LANTERNE_STREAM_LEGACY     1
#define LANTERNE_STREAM_PER_THREAD 2
#define LANTERNE_STREAM_NAMED      3
#define LANTERNE_STREAM_UNREAD     4 /* in user memory that could not be read */

/* CUDA activity of one process on one device and kind of stream, read by the agent once a window;
 * never one record per launch. device: ordinal in the process + 1; 0: not known. */
struct lanterne_cuda_key {
	__u32 tgid;
	__u16 device;
	__u8 stream; /* LANTERNE_STREAM_* */
	__u8 pad;
};

#define LANTERNE_SYNC_BINS 32
struct lanterne_cuda {
	__u64 launches;
	__u64 graph_launches;
	__u64 syncs;
	__u64 sync_ns;
	__u64 sync_bins[LANTERNE_SYNC_BINS]; /* bin b counts durations in [2^b, 2^(b+1)) ns; last: more */
};

#endif
