// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* libcuda: launches are counted and synchronise calls are timed in maps; nothing goes through a
 * ring, since an eager job launches a hundred thousand kernels a second. */

static inline struct lanterne_cuda *process_of(u32 tgid)
{
	struct lanterne_cuda *p = cuda.lookup(&tgid);
	struct lanterne_cuda zero = {};

	if (p)
		return p;
	cuda.insert(&tgid, &zero);
	p = cuda.lookup(&tgid);
	if (!p)
		count(LANTERNE_N_LOST_CUDA);
	return p;
}

static inline void add_launch(bool graph)
{
	u64 id = bpf_get_current_pid_tgid();
	struct lanterne_thread *t = thread_of(id);
	struct lanterne_cuda *p = process_of(id >> 32);

	if (t)
		t->launches++;
	else
		count(LANTERNE_N_LOST_CUDA);
	if (p)
		__sync_fetch_and_add(graph ? &p->graph_launches : &p->launches, 1);
}

int launch(struct pt_regs *ctx)
{
	add_launch(false);
	return 0;
}

int graph_launch(struct pt_regs *ctx)
{
	add_launch(true);
	return 0;
}

int sync_entry(struct pt_regs *ctx)
{
	struct lanterne_thread *t = thread_of(bpf_get_current_pid_tgid());

	if (t)
		t->sync_enter_ns = bpf_ktime_get_ns();
	else
		count(LANTERNE_N_LOST_CUDA);
	return 0;
}

static inline u32 log2_bin(u64 ns)
{
	u32 bin = 0;

	if (ns >> 32)
		return LANTERNE_SYNC_BINS - 1;
	for (u32 shift = 16; shift; shift >>= 1) {
		if (ns >> shift) {
			ns >>= shift;
			bin += shift;
		}
	}
	return bin;
}

int sync_return(struct pt_regs *ctx)
{
	u64 now = bpf_ktime_get_ns();
	u64 id = bpf_get_current_pid_tgid();
	struct lanterne_thread *t = thread_of(id);
	struct lanterne_cuda *p;
	u64 blocked;

	if (!t || !t->sync_enter_ns) {
		count(LANTERNE_N_ORPHAN_RETURN);
		return 0;
	}
	blocked = now - t->sync_enter_ns;
	t->sync_enter_ns = 0;
	if ((u32)return_value(ctx)) /* failed: it has not waited for the device */
		return 0;
	t->sync_return_ns = now;
	t->blocked_ns += blocked;
	t->launches = 0;
	p = process_of(id >> 32);
	if (!p)
		return 0;
	__sync_fetch_and_add(&p->syncs, 1);
	__sync_fetch_and_add(&p->sync_ns, blocked);
	__sync_fetch_and_add(&p->sync_bins[log2_bin(blocked) & (LANTERNE_SYNC_BINS - 1)], 1);
	return 0;
}

/* At return: a capture that could not begin has no end. */
int capture_begin(struct pt_regs *ctx)
{
	struct lanterne_thread *t = thread_of(bpf_get_current_pid_tgid());

	if (t && !(u32)return_value(ctx))
		t->capture++;
	return 0;
}

int capture_end(struct pt_regs *ctx)
{
	struct lanterne_thread *t = thread_of(bpf_get_current_pid_tgid());

	if (t && t->capture)
		t->capture--;
	return 0;
}
