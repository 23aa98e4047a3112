// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Dispatch and combine of expert-parallel libraries: DeepEP and NCCL EP, one record an exchange.
 *
 * DeepEP's launchers have no communicator among their arguments: rank and size stand for it, and
 * the record's comm is a number that no user pointer can have. A low-latency exchange may be two
 * calls, a sending and a receiving one: the sending one is the record, the other adds nothing.
 *
 * A normal dispatch waits on the host, between notify_dispatch and the dispatch launcher, until
 * every rank's counts have arrived: a barrier of all ranks. Its record begins at the return of
 * notify_dispatch and lasts until the launcher's entry, F_PAIR | F_BLOCKING. The host does not wait
 * where the caller has given the worst case, or where the routing is that of an earlier exchange
 * (cached: no notify_dispatch).
 */
#define EXPERTS_TAG (0xdee9ULL << 48)
#define MAX_SIZE    65536
#define PHASE_SEND  1
#define LONGEST_WAIT_NS (100ULL * 1000000000) /* DeepEP gives up then, and so do we */
#define MAX_TENSOR_DIMENSIONS 8

int moe_notified(struct pt_regs *ctx)
{
	struct lanterne_thread *t = thread_of(bpf_get_current_pid_tgid());

	if (t)
		t->notified_ns = bpf_ktime_get_ns();
	else
		count(LANTERNE_N_LOST_STATE);
	return 0;
}

static inline u32 field32(const struct arguments *a, struct lanterne_row *row, u32 which)
{
	u64 v;

	if (fetch(a, &row->source[which], &v))
		return 0xffffffff;
	return (u32)v;
}

/* Rank and size of the caller; -1 where they make no sense: then the layout is another one. */
static inline int read_place(const struct arguments *a, struct lanterne_row *row, u32 *rank,
			     u32 *size)
{
	*rank = field32(a, row, LANTERNE_RANK);
	*size = field32(a, row, LANTERNE_N_RANKS);
	if (!*size || *size > MAX_SIZE || *rank >= *size)
		return -1;
	if (row->source[LANTERNE_OUT_RANKS].kind) {
		u32 out_rank = field32(a, row, LANTERNE_OUT_RANK);
		u32 out_size = field32(a, row, LANTERNE_OUT_RANKS);

		if (!out_size || out_size > MAX_SIZE || out_rank >= out_size)
			return -1;
		*rank += out_rank * *size;
		*size *= out_size;
	}
	return *size > MAX_SIZE ? -1 : 0;
}

/* Bytes of the tokens that go in: tokens * hidden * element size; *token: of one of them. */
static inline u64 payload(const struct arguments *a, struct lanterne_row *row, s32 *token)
{
	u64 tokens, hidden, unit;

	if (fetch(a, &row->source[LANTERNE_COUNT], &tokens) ||
	    fetch(a, &row->source[LANTERNE_SCALE], &hidden) ||
	    fetch(a, &row->source[LANTERNE_UNIT], &unit)) {
		count(LANTERNE_N_LOST_READ);
		return 0;
	}
	if ((s32)tokens < 0 || (s32)hidden < 0)
		return 0;
	if (row->source[LANTERNE_HALVED].kind && field32(a, row, LANTERNE_HALVED) & 0xff)
		unit >>= 1;
	if (hidden * unit && hidden * unit < 1u << 31)
		*token = (s32)(hidden * unit);
	return tokens * hidden * unit;
}

/* ncclEpTensor_t: ndim u32 @8, datatype u32 @12, sizes pointer @40; tokens come first, the hidden
 * size last. */
static inline void fill_from_tensor(struct lanterne_record *r, u64 tensor)
{
	u64 head[6], tokens, hidden;
	u32 dimensions;

	if (bpf_probe_read_user(head, sizeof(head), (void *)tensor))
		goto lost;
	dimensions = (u32)head[1];
	if (!dimensions || dimensions > MAX_TENSOR_DIMENSIONS)
		goto lost;
	if (bpf_probe_read_user(&tokens, 8, (void *)head[5]) ||
	    bpf_probe_read_user(&hidden, 8, (void *)(head[5] + 8 * (dimensions - 1))))
		goto lost;
	r->count = dimensions > 1 ? tokens * hidden : tokens;
	if (dimensions > 1 && hidden && hidden < 1u << 31)
		r->peer = (s32)hidden;
	r->dtype = (u8)(head[1] >> 32);
	return;
lost:
	count(LANTERNE_N_LOST_READ);
}

static inline void fill_wait(struct lanterne_record *r, struct lanterne_row *row,
			     const struct arguments *a, struct lanterne_thread *t)
{
	u64 since = t->notified_ns;
	u32 worst = 0;

	t->notified_ns = 0;
	if (!since || r->enter_ns < since || r->enter_ns - since > LONGEST_WAIT_NS)
		return;
	if (row->source[LANTERNE_WORST].kind)
		worst = field32(a, row, LANTERNE_WORST);
	if (worst)
		return;
	r->duration_ns = r->enter_ns - since;
	r->enter_ns = since;
	r->flags |= LANTERNE_F_PAIR | LANTERNE_F_BLOCKING;
}

int moe_entry(struct pt_regs *ctx)
{
	u64 id = bpf_get_current_pid_tgid(), comm, stream, tensor;
	struct lanterne_row *row = row_of((u32)bpf_get_attach_cookie(ctx));
	struct lanterne_record *r;
	struct lanterne_thread *t;
	struct lanterne_comm *c;
	struct arguments a;
	bool fresh = false;
	u32 rank, size, seq, top_k;
	s32 token = -1;

	if (!row)
		return 0;
	read_arguments(ctx, &a);
	if (row->source[LANTERNE_PHASES].kind &&
	    !(field32(&a, row, LANTERNE_PHASES) & PHASE_SEND))
		return 0;
	if (read_place(&a, row, &rank, &size) || fetch(&a, &row->source[LANTERNE_COMM], &comm)) {
		count(LANTERNE_N_LOST_READ);
		return 0;
	}
	if (row->traits & LANTERNE_R_EXPERTS)
		comm = EXPERTS_TAG | (u64)size << 8;
	t = thread_of(id);
	c = comm_of(id >> 32, comm, &fresh);
	if (!t || !c) {
		count(LANTERNE_N_LOST_STATE);
		return 0;
	}
	seq = (u32)__sync_fetch_and_add(&c->seq, 1);
	r = ring.ringbuf_reserve(sizeof(*r));
	if (!r) {
		count(LANTERNE_N_LOST_RING);
		return 0;
	}
	r->enter_ns = bpf_ktime_get_ns();
	r->duration_ns = 0;
	r->comm = comm;
	r->count = 0;
	r->tgid = id >> 32;
	r->tid = (u32)id;
	r->seq = seq;
	r->peer = -1;
	r->rc = 0;
	r->probe = (u16)bpf_get_attach_cookie(ctx);
	r->func = row->func;
	r->dtype = 255;
	top_k = field32(&a, row, LANTERNE_TOP_K);
	r->top_k = top_k < 256 ? (u8)top_k : 0;
	r->pad[0] = r->pad[1] = 0;
	r->stream = fetch(&a, &row->source[LANTERNE_STREAM], &stream) ? 0 : stream;
	fill_from_thread(r, t, row->flags);
	if (row->traits & LANTERNE_R_TENSOR) {
		if (!fetch(&a, &row->source[LANTERNE_COUNT], &tensor))
			fill_from_tensor(r, tensor);
	} else {
		r->count = payload(&a, row, &token);
		r->peer = token;
	}
	if (row->traits & LANTERNE_R_NOTIFIED)
		fill_wait(r, row, &a, t);
	if (fresh) {
		c->rank = (s32)rank;
		c->n_ranks = size;
		r->flags |= LANTERNE_F_FIRST;
		tell_first_use(r->enter_ns, id, comm, c, r->probe);
	}
	ring.ringbuf_submit(r, NO_WAKEUP);
	count(LANTERNE_N_SUBMITTED);
	return 0;
}
