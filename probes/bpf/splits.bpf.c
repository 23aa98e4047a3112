// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* c10d::ProcessGroup*'s all-to-all: how many rows of its tensors a rank sends and receives.
 *
 * It is no operation of its own: the transport below it is probed, and tells bytes. The two together
 * tell the bytes of a row, which is a token. `this` is a c10d::Backend. The split sizes are
 * std::vector<int64_t> by reference: begin and end pointer; empty ones mean equal parts, whose rows
 * the arguments do not tell. A row that does not say where the rank is has sends in the same thread
 * right behind it: its vectors tell the size, and where nothing is sent nor received no send
 * follows, so there is nothing to tell. */
#define MAX_SPLITS 1024

/* Sum of a vector of `n` entries; -1 where it has another length or cannot be read. */
static inline s64 sum_of(u64 vector, u32 n)
{
	u64 at[2], sum = 0;
	s64 v;

	if (bpf_probe_read_user(at, sizeof(at), (void *)vector))
		return -1;
	if (at[1] - at[0] != 8ULL * n)
		return -1;
	for (u32 i = 0; i < MAX_SPLITS && i < EACH_TIME(n); i++) {
		if (bpf_probe_read_user(&v, sizeof(v), (void *)(at[0] + 8 * i)) || v < 0)
			return -1;
		sum += v;
	}
	return sum >> 48 ? -1 : (s64)sum;
}

static inline bool is_empty(u64 vector)
{
	u64 at[2];

	return !bpf_probe_read_user(at, sizeof(at), (void *)vector) && at[0] == at[1];
}

static inline u32 length_of(u64 vector)
{
	u64 at[2];

	if (bpf_probe_read_user(at, sizeof(at), (void *)vector) || at[1] < at[0] ||
	    (at[1] - at[0]) & 7 || at[1] - at[0] > 8ULL * MAX_SPLITS)
		return 0;
	return (u32)((at[1] - at[0]) >> 3);
}

int alltoall_splits(struct pt_regs *ctx)
{
	u64 now = bpf_ktime_get_ns(), id = bpf_get_current_pid_tgid();
	u32 probe = (u32)bpf_get_attach_cookie(ctx);
	struct lanterne_row *row = row_of(probe);
	u64 object = 0, sends = 0, receives = 0, rank = 0, size = 0;
	struct lanterne_record *r;
	struct arguments a;
	s64 sent, received;
	bool placed;
	u32 n;

	if (!row)
		return 0;
	read_arguments(ctx, &a);
	fetch(&a, &row->source[LANTERNE_VECTOR], &sends);
	fetch(&a, &row->source[LANTERNE_RECEIVE_VECTOR], &receives);
	if (is_empty(sends) && is_empty(receives))
		return 0;
	placed = row->source[LANTERNE_RANK].kind != LANTERNE_S_NONE;
	if (!placed)
		size = length_of(sends);
	if (fetch(&a, &row->source[LANTERNE_COMM], &object) ||
	    fetch(&a, &row->source[LANTERNE_RANK], &rank) ||
	    (placed && fetch(&a, &row->source[LANTERNE_N_RANKS], &size)) ||
	    !size || rank >= size || size > MAX_SPLITS) {
		count(LANTERNE_N_LOST_READ);
		return 0;
	}
	n = (u32)size;
	sent = sum_of(sends, n);
	received = sum_of(receives, n);
	if (sent < 0 || received < 0) {
		count(LANTERNE_N_LOST_READ);
		return 0;
	}
	if (!placed && !sent && !received)
		return 0;
	r = ring.ringbuf_reserve(sizeof(*r));
	if (!r) {
		count(LANTERNE_N_LOST_RING);
		return 0;
	}
	__builtin_memset(r, 0, sizeof(*r));
	r->enter_ns = now;
	r->comm = object;
	r->count = sent;
	r->stream = received;
	r->tgid = id >> 32;
	r->tid = (u32)id;
	r->seq = n;
	r->peer = placed ? (s32)rank : -1;
	r->probe = (u16)probe;
	r->func = row->func;
	r->dtype = 255;
	ring.ringbuf_submit(r, NO_WAKEUP);
	count(LANTERNE_N_SUBMITTED);
	return 0;
}
