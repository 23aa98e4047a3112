// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Collectives, sends and receives: one record a call, one more per peer for vector all-to-alls. */

/* Functions of ncclFunc_t whose root field means something: the others leave it at 0. */
#define HAS_PEER ((1 << 0) | (1 << 1) | (1 << 6) | (1 << 7) | (1 << 9) | (1 << 10) | (1 << 12) | \
		  (1 << 13))
#define FUNC_SEND 6
#define FUNC_RECV 7
/* Point to point or one-sided: SendRecv, Send, Recv, PutSignal, Signal, WaitSignal. */
#define IS_P2P ((1 << 5) | (1 << 6) | (1 << 7) | (1 << 12) | (1 << 13) | (1 << 14))

static inline u32 microseconds(u64 ns)
{
	u64 us = ns / 1000;

	return us > 0xffffffff ? 0xffffffff : (u32)us;
}

/* The number of the operation: collectives by one, sends and receives by one per group, so that
 * the ranks agree on both whatever their number of peers. */
static inline u32 number_of(struct lanterne_comm *c, u32 group, u8 flags)
{
	if (!(flags & LANTERNE_F_P2P)) {
		if (flags & LANTERNE_F_BLOCKING) /* worker threads share a gloo context */
			return (u32)__sync_fetch_and_add(&c->seq, 1);
		return (u32)c->seq++;
	}
	if (group && c->p2p_group == group)
		return (u32)c->p2p - 1;
	c->p2p_group = group;
	return (u32)c->p2p++;
}

static inline void tell_first_use(u64 now, u64 id, u64 comm, struct lanterne_comm *c, u16 probe)
{
	struct lanterne_comm_event *e = comm_ring.ringbuf_reserve(sizeof(*e));

	if (!e) {
		count(LANTERNE_N_LOST_COMM_RING);
		return;
	}
	__builtin_memset(e, 0, sizeof(*e));
	e->time_ns = now;
	e->comm = comm;
	e->tgid = id >> 32;
	e->tid = (u32)id;
	e->n_ranks = c->n_ranks;
	e->rank = c->rank;
	e->probe = probe;
	e->kind = LANTERNE_C_FIRST_USE;
	if (c->n_ranks)
		e->flags = LANTERNE_CF_RANK;
	comm_ring.ringbuf_submit(e, NO_WAKEUP);
	count(LANTERNE_N_COMM_SUBMITTED);
}

/* A collective of a process that uses CUDA, for its steps. */
static inline void note_collective(u32 tgid, bool captured)
{
	struct lanterne_process *p = process_of(tgid);

	if (!p)
		return;
	if (captured) {
		__sync_fetch_and_add(&p->captured_ops, 1);
	} else if (!p->seen) {
		p->seen = 1;
		p->open = 1;
	}
}

/* The fields that come from the thread's state, and what the record does to that state. */
static inline void fill_from_thread(struct lanterne_record *r, struct lanterne_thread *t, u8 flags)
{
	u64 age;

	r->group = t->group;
	if (t->depth)
		flags |= LANTERNE_F_GROUP;
	if (t->capture)
		flags |= LANTERNE_F_CAPTURE;
	if (!(flags & LANTERNE_F_BLOCKING)) /* not gloo's, on CPUs */
		note_collective(r->tgid, t->capture != 0);
	r->sync_age_us = 0;
	r->sync_blocked_us = 0;
	if (t->sync_return_ns) {
		flags |= LANTERNE_F_SYNCED;
		r->sync_age_us = microseconds(r->enter_ns - t->sync_return_ns);
		if (t->blocked_ns) {
			r->sync_blocked_us = microseconds(t->blocked_ns);
			t->blocked_ns = 0;
		}
	}
	r->launches = t->launches > 0xffff ? 0xffff : (u16)t->launches;
	t->launches++;
	r->flags = flags;
}

/* NCCL: every collective, send, recv and one-sided call passes ncclEnqueueCheck(ncclInfo *), and
 * the first 72 bytes of ncclInfo are the same from 2.18 to 2.32:
 * coll u32 @0, count u64 @32, datatype u32 @40, root s32 @48, comm @56, stream @64. */
int enqueue_check(struct pt_regs *ctx)
{
	u64 now = bpf_ktime_get_ns();
	u64 id = bpf_get_current_pid_tgid();
	u32 tgid = id >> 32;
	struct lanterne_thread *t;
	struct lanterne_comm *c;
	struct lanterne_record *r;
	bool fresh = false;
	u64 info[9];
	u32 func, seq;
	u8 flags;

	if (bpf_probe_read_user(info, sizeof(info), (void *)first_argument(ctx))) {
		count(LANTERNE_N_LOST_READ);
		return 0;
	}
	t = thread_of(id);
	c = comm_of(tgid, info[7], &fresh);
	if (!t || !c) {
		count(LANTERNE_N_LOST_STATE);
		return 0;
	}
	func = (u32)info[0];
	flags = func < 16 && (1 << func & IS_P2P) ? LANTERNE_F_P2P : 0;
	seq = number_of(c, t->group, flags);
	if (fresh) {
		flags |= LANTERNE_F_FIRST;
		tell_first_use(now, id, info[7], c, LANTERNE_ROW_ENQUEUE_CHECK);
	}
	r = ring.ringbuf_reserve(sizeof(*r));
	if (!r) {
		count(LANTERNE_N_LOST_RING);
		return 0;
	}
	r->enter_ns = now;
	r->duration_ns = 0;
	r->comm = info[7];
	r->count = info[4];
	r->stream = info[8];
	r->tgid = tgid;
	r->tid = (u32)id;
	r->seq = seq;
	r->peer = func < 16 && (1 << func & HAS_PEER) ? (s32)info[6] : -1;
	r->rc = 0;
	r->probe = LANTERNE_ROW_ENQUEUE_CHECK;
	r->func = func < 32 ? (u8)func : 255;
	r->dtype = (u8)info[5];
	fill_from_thread(r, t, flags);
	r->top_k = r->pad[0] = r->pad[1] = 0;
	ring.ringbuf_submit(r, NO_WAKEUP);
	count(LANTERNE_N_SUBMITTED);
	return 0;
}

/* Rank and size of a gloo::Context: the first two members, after a virtual table in releases
 * where the class has one. A table's address never reads as 0 <= rank < size. */
static inline int read_gloo_context(u64 comm, s32 *rank, u32 *n_ranks)
{
	s32 at[4];

	if (bpf_probe_read_user(at, sizeof(at), (void *)comm))
		return -1;
	if (at[0] >= 0 && at[0] < at[1]) {
		*rank = at[0];
		*n_ranks = at[1];
		return 0;
	}
	if (at[2] >= 0 && at[2] < at[3]) {
		*rank = at[2];
		*n_ranks = at[3];
		return 0;
	}
	return -1;
}

/* What is known of a call before its record exists. */
struct call {
	struct arguments arguments;
	struct lanterne_thread *thread;
	struct lanterne_comm *comm;
	u64 now;
	u64 id;
	u64 pointer; /* of the communicator */
	u32 seq;
	u16 probe;
	u8 flags;
};

/* 0; or a negative number when the call cannot be recorded, which is then counted. */
static inline int identify(struct pt_regs *ctx, struct lanterne_row *row, struct call *call)
{
	struct lanterne_thread *t;
	struct lanterne_comm *c;
	bool fresh = false;

	read_arguments(ctx, &call->arguments);
	if (fetch(&call->arguments, &row->source[LANTERNE_COMM], &call->pointer)) {
		count(LANTERNE_N_LOST_READ);
		return -1;
	}
	t = thread_of(call->id);
	c = comm_of(call->id >> 32, call->pointer, &fresh);
	if (!t || !c) {
		count(LANTERNE_N_LOST_STATE);
		return -1;
	}
	call->thread = t;
	call->comm = c;
	call->flags = row->flags;
	call->seq = number_of(c, t->group, call->flags);
	if (fresh) {
		call->flags |= LANTERNE_F_FIRST;
		if (row->traits & LANTERNE_R_GLOO)
			read_gloo_context(call->pointer, &c->rank, &c->n_ranks);
		tell_first_use(call->now, call->id, call->pointer, c, call->probe);
	}
	return 0;
}

/* What is missing here is told as 0 elements, type 255, peer -1: the call still counts. */
static inline void fill_from_arguments(struct lanterne_record *r, struct lanterne_row *row,
				       const struct call *call)
{
	const struct arguments *a = &call->arguments;
	u64 v, scale;

	r->enter_ns = call->now;
	r->duration_ns = 0;
	r->comm = call->pointer;
	r->tgid = call->id >> 32;
	r->tid = (u32)call->id;
	r->seq = call->seq;
	r->rc = 0;
	r->probe = call->probe;
	r->func = row->func;
	r->top_k = r->pad[0] = r->pad[1] = 0;
	if (fetch(a, &row->source[LANTERNE_COUNT], &v))
		v = 0;
	if (row->source[LANTERNE_SCALE].kind) {
		if (fetch(a, &row->source[LANTERNE_SCALE], &scale))
			scale = 0;
		v *= scale;
	}
	if (row->traits & LANTERNE_R_PER_PEER)
		v = call->comm->n_ranks ? v / call->comm->n_ranks : 0;
	r->count = v;
	r->dtype = 255;
	if (row->source[LANTERNE_DTYPE].kind && !fetch(a, &row->source[LANTERNE_DTYPE], &v))
		r->dtype = (u8)v;
	r->peer = -1;
	if (row->source[LANTERNE_PEER].kind && !fetch(a, &row->source[LANTERNE_PEER], &v))
		r->peer = (s32)v;
	if (fetch(a, &row->source[LANTERNE_STREAM], &v))
		v = 0;
	r->stream = v;
	fill_from_thread(r, call->thread, call->flags);
}

int collective_entry(struct pt_regs *ctx)
{
	u32 probe = (u32)bpf_get_attach_cookie(ctx);
	struct lanterne_row *row = row_of(probe);
	struct lanterne_record *r;
	struct call call;

	if (!row)
		return 0;
	call.now = bpf_ktime_get_ns();
	call.id = bpf_get_current_pid_tgid();
	call.probe = (u16)probe;
	if (identify(ctx, row, &call))
		return 0;
	r = ring.ringbuf_reserve(sizeof(*r));
	if (!r) {
		count(LANTERNE_N_LOST_RING);
		return 0;
	}
	fill_from_arguments(r, row, &call);
	ring.ringbuf_submit(r, NO_WAKEUP);
	count(LANTERNE_N_SUBMITTED);
	return 0;
}

static inline void submit(const struct lanterne_record *from)
{
	struct lanterne_record *r = ring.ringbuf_reserve(sizeof(*r));

	if (!r) {
		count(LANTERNE_N_LOST_RING);
		return;
	}
	__builtin_memcpy(r, from, sizeof(*r));
	ring.ringbuf_submit(r, NO_WAKEUP);
	count(LANTERNE_N_SUBMITTED);
}

/* The call of a thread that has been entered and has not returned. */
struct open_call {
	struct lanterne_record record;
	u64 sp; /* stack pointer at entry: names the frame */
	u64 open;
};
BPF_HASH(open_calls, u64, struct open_call, 8192);

/* One record per peer with the bytes that this rank sends to it or receives from it, all with the
 * number and group of the call, whose own record follows at its return. */
static inline void tell_vector(const struct lanterne_record *call, u64 vector,
			       const struct lanterne_comm *comm, u8 func)
{
	struct lanterne_record *r;
	u64 bytes;

	for (u32 peer = 0; peer < LANTERNE_PEERS; peer++) {
		if (peer >= EACH_TIME(comm->n_ranks))
			break;
		if (bpf_probe_read_user(&bytes, 8, (void *)(vector + 8 * peer))) {
			count(LANTERNE_N_LOST_READ);
			break;
		}
		r = ring.ringbuf_reserve(sizeof(*r));
		if (!r) {
			count(LANTERNE_N_LOST_RING);
			continue;
		}
		__builtin_memcpy(r, call, sizeof(*r));
		r->count = bytes;
		r->peer = peer;
		r->func = func;
		r->dtype = 255;
		r->flags = LANTERNE_F_P2P | LANTERNE_F_BYTES | LANTERNE_F_BLOCKING;
		ring.ringbuf_submit(r, NO_WAKEUP);
		count(LANTERNE_N_SUBMITTED);
	}
}

int pair_entry(struct pt_regs *ctx)
{
	u32 probe = (u32)bpf_get_attach_cookie(ctx);
	u64 id = bpf_get_current_pid_tgid();
	struct lanterne_row *row = row_of(probe);
	struct open_call *open = open_calls.lookup(&id), fresh = {};
	struct call call;
	u64 vector;

	if (!row)
		return 0;
	if (open && open->open) {
		if (ctx->sp < open->sp) {
			count(LANTERNE_N_NESTED);
			return 0;
		}
		/* That frame is gone and its return was not seen: an exception. Its record goes
		 * out without a duration. */
		open->open = 0;
		submit(&open->record);
	}
	call.now = bpf_ktime_get_ns();
	call.id = id;
	call.probe = (u16)probe;
	if (identify(ctx, row, &call))
		return 0;
	/* Filled in place: what stands in a map is not part of the verifier's state, which before
	 * 6.8 would otherwise grow beyond its limit. */
	if (!open) {
		open_calls.update(&id, &fresh);
		open = open_calls.lookup(&id);
		if (!open) {
			count(LANTERNE_N_LOST_SCRATCH);
			return 0;
		}
	}
	fill_from_arguments(&open->record, row, &call);
	if (row->source[LANTERNE_VECTOR].kind &&
	    !fetch(&call.arguments, &row->source[LANTERNE_VECTOR], &vector)) {
		open->record.group = next_group();
		tell_vector(&open->record, vector, call.comm, FUNC_SEND);
		if (row->source[LANTERNE_RECEIVE_VECTOR].kind &&
		    !fetch(&call.arguments, &row->source[LANTERNE_RECEIVE_VECTOR], &vector))
			tell_vector(&open->record, vector, call.comm, FUNC_RECV);
	}
	open->sp = ctx->sp;
	open->open = 1;
	return 0;
}

/* x86-64: the return address is popped by now; aarch64: the stack pointer is that of the entry.
 * A frame further in or further out differs by more. */
static inline bool same_frame(struct pt_regs *ctx, u64 sp)
{
	return ctx->sp - sp <= 8;
}

int pair_return(struct pt_regs *ctx)
{
	u64 now = bpf_ktime_get_ns();
	u64 id = bpf_get_current_pid_tgid();
	struct open_call *open = open_calls.lookup(&id);

	if (!open || !open->open) {
		count(LANTERNE_N_ORPHAN_RETURN);
		return 0;
	}
	if (!same_frame(ctx, open->sp)) {
		if (ctx->sp > open->sp)
			count(LANTERNE_N_ORPHAN_RETURN);
		return 0;
	}
	open->open = 0;
	open->record.duration_ns = now - open->record.enter_ns;
	open->record.rc = (s16)return_value(ctx);
	open->record.flags |= LANTERNE_F_PAIR;
	submit(&open->record);
	return 0;
}
