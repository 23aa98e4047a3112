/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* A catalog row as the programs read it. The mirror is probes/rows.py; a contract test compares. */
#ifndef LANTERNE_ROW_H
#define LANTERNE_ROW_H

/* Where one value is found at function entry. */
#define LANTERNE_S_NONE       0 /* not there */
#define LANTERNE_S_REGISTER   1 /* argument register `reg` */
#define LANTERNE_S_STACK      2 /* memory at stack pointer + first */
#define LANTERNE_S_STACK_ADDR 3 /* the address stack pointer + first: a struct passed by value */
#define LANTERNE_S_MEMORY     4 /* *(register + first) */
#define LANTERNE_S_CHAIN      5 /* *(*(register + first) + second) */
#define LANTERNE_S_CONSTANT   6 /* first */
/* Operands of a USDT note: `reg` is the number of an 8-byte word of struct pt_regs, any of them, and
 * `width` may be 1 or 2 as well. */
#define LANTERNE_S_WORD       7 /* the word */
#define LANTERNE_S_WORD_MEMORY 8 /* *(word + first) */

struct lanterne_source {
	__u8 kind;
	__u8 reg;   /* index of the argument register: 0 is rdi or x0 */
	__u8 width; /* bytes: 4 or 8 */
	__u8 pad;
	__s32 first;
	__s32 second;
};

/* Index into lanterne_row.source. */
enum lanterne_field {
	LANTERNE_COMM,   /* communicator pointer */
	LANTERNE_COUNT,
	LANTERNE_SCALE,  /* bytes per element: count becomes count * scale */
	LANTERNE_DTYPE,
	LANTERNE_PEER,   /* root or peer */
	LANTERNE_STREAM,
	LANTERNE_SLOT,   /* address of the variable that receives the new communicator */
	LANTERNE_N_RANKS,
	LANTERNE_RANK,
	LANTERNE_COLOR,
	LANTERNE_KEY,
	LANTERNE_ID,     /* address of the 128-byte unique id */
	LANTERNE_CONFIG, /* ncclConfig_t pointer */
	LANTERNE_VECTOR, /* first element of the bytes sent per peer (u64 each) */
	LANTERNE_RECEIVE_VECTOR, /* likewise of the bytes received */
	LANTERNE_TOP_K,  /* experts per token */
	LANTERNE_UNIT,   /* bytes of what SCALE counts */
	LANTERNE_HALVED, /* bool: the count is half of that */
	LANTERNE_PHASES, /* of a low-latency exchange: 1 sends, 2 receives, 3 both */
	LANTERNE_WORST,  /* not 0: the host does not wait for the counts of the others */
	LANTERNE_OUT_RANK,  /* rank is OUT_RANK * N_RANKS + RANK, of OUT_RANKS * N_RANKS */
	LANTERNE_OUT_RANKS,
	LANTERNE_FIELDS,
};

#define LANTERNE_R_PER_PEER (1 << 0) /* count is of all peers: divide by the number of ranks */
#define LANTERNE_R_GLOO     (1 << 1) /* communicator is a gloo::Context: rank and size in it */
#define LANTERNE_R_GRAPH    (1 << 2) /* a launch of a whole graph */
#define LANTERNE_R_FREES    (1 << 3) /* the communicator does not exist after this call */
#define LANTERNE_R_EXPERTS  (1 << 4) /* no communicator in the arguments: rank and size name it */
#define LANTERNE_R_NOTIFIED (1 << 5) /* the host has waited for all ranks since notify_dispatch */
#define LANTERNE_R_TENSOR   (1 << 6) /* COUNT is an ncclEpTensor_t pointer */
#define LANTERNE_R_PER_THREAD (1 << 7) /* stream 0 is the thread's own default stream */

/* `func` of a row about CUDA contexts. SLOT is where the call stores what it makes. */
#define LANTERNE_X_MADE    1 /* context of device RANK, stored at SLOT */
#define LANTERNE_X_ENTERED 2 /* the same, and now the thread's current one, pushed */
#define LANTERNE_X_SET     3 /* context COMM is the thread's current one, in place of the last */
#define LANTERNE_X_PUSHED  4 /* the same, on top of the last */
#define LANTERNE_X_POPPED  5
#define LANTERNE_X_ENDED   6 /* context COMM is gone */
#define LANTERNE_X_ASKED   7 /* the device of the current context is stored at SLOT, 4 bytes */

struct lanterne_row {
	__u8 func;   /* layout.Func, or LANTERNE_C_* of a communicator row */
	__u8 flags;  /* LANTERNE_F_* that every record of this row has */
	__u8 traits; /* LANTERNE_R_* */
	__u8 pad;
	struct lanterne_source source[LANTERNE_FIELDS];
};

_Static_assert(sizeof(struct lanterne_source) == 12, "rows.SOURCE mirrors this");
_Static_assert(sizeof(struct lanterne_row) == 268, "rows.ROW mirrors this");

/* State of one thread, one cache line; `threads` is scanned by the agent to free the dead. */
struct lanterne_thread {
	__u64 id;             /* tgid << 32 | tid; 0: free */
	__u64 sync_return_ns; /* 0: this thread has never returned from a synchronise call */
	__u64 sync_enter_ns;  /* 0: not in one now */
	__u64 blocked_ns;     /* in synchronise calls since the last record */
	__u32 launches;       /* since sync_return_ns */
	__u32 group;          /* number of the outermost group; 0: none open */
	__u32 depth;
	__u16 capture;        /* open stream captures */
	__u8 sync_stream;     /* LANTERNE_STREAM_* of the synchronise call under way */
	__u8 pad;
	__u32 pending;        /* communicators created in the open group */
	__u16 device;         /* of the current context: CUdevice + 1; 0: not known */
	__u16 under;          /* of the context below it */
	__u64 notified_ns;    /* return of notify_dispatch; 0: none, or its dispatch has begun */
};

/* State of one communicator in one process. */
struct lanterne_comm {
	__u64 key;       /* comm ^ tgid << 42; 0: free */
	__u64 seq;       /* next number of the collective lane */
	__u64 p2p;       /* next number of the send and recv lane */
	__u32 p2p_group; /* group that has the number p2p - 1 */
	__u32 tgid;
	__u32 n_ranks;   /* 0: unknown */
	__s32 rank;
};

/* Steps of one process that uses CUDA. A step goes from one boundary to the next, if anything was
 * launched or called in between; boundaries are the return of a synchronise call on a thread that
 * has launched something since its last one, and the launch of a graph behind that of another. What
 * is recorded into a graph runs later and belongs to no step. */
struct lanterne_process {
	__u64 tgid;         /* 0: free */
	__u64 open;         /* 1: something was launched or called in the step */
	__u32 replays;      /* 1: a graph was launched in it */
	__u32 seen;         /* 1: a collective was seen in it */
	__u64 launches;     /* of kernels and graphs; the bins of `cuda` tell them apart */
	__u64 steps;
	__u64 silent_steps; /* of them, without a collective that was seen */
	__u64 replay_steps; /* of these, with the launch of a graph */
	__u64 captured_ops; /* collectives recorded into graphs */
};

_Static_assert(sizeof(struct lanterne_thread) == 64, "rows.THREAD mirrors this");
_Static_assert(sizeof(struct lanterne_comm) == 40, "rows.COMM mirrors this");
_Static_assert(sizeof(struct lanterne_process) == 64, "rows.PROCESS mirrors this");

#define LANTERNE_THREADS 16384 /* sets of 4 */
#define LANTERNE_COMMS   16384 /* sets of 4 */
#define LANTERNE_PROCESSES 4096 /* sets of 4 */
#define LANTERNE_ROWS    256
#define LANTERNE_PEERS   64    /* peers of one call that are told, at most */
#define LANTERNE_PENDING 64    /* communicators created in one group that are looked at again */

#endif
