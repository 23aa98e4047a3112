// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* libcuda: launches are counted and synchronise calls are timed in maps; nothing goes through a
 * ring, since an eager job launches a hundred thousand kernels a second. */

/* Made once per (process, device, kind of stream): there is no room for it on the stack of the
 * programs that add to it. */
static inline struct lanterne_cuda *bin_of(u32 tgid, const struct lanterne_thread *t, u8 stream)
{
	struct lanterne_cuda_key key = {};
	struct lanterne_cuda *bin, zero = {};

	key.tgid = tgid;
	key.device = t->device;
	key.stream = stream;
	bin = cuda.lookup(&key);
	if (bin)
		return bin;
	cuda.insert(&key, &zero);
	bin = cuda.lookup(&key);
	if (!bin)
		count(LANTERNE_N_LOST_CUDA);
	return bin;
}

static inline u8 stream_kind(struct pt_regs *ctx)
{
	struct lanterne_row *row = row_of((u32)bpf_get_attach_cookie(ctx));
	struct arguments a;
	u64 stream;

	if (!row || !row->source[LANTERNE_STREAM].kind)
		return LANTERNE_STREAM_NONE;
	read_arguments(ctx, &a);
	if (fetch(&a, &row->source[LANTERNE_STREAM], &stream))
		return LANTERNE_STREAM_UNREAD;
	if (stream > 2)
		return LANTERNE_STREAM_NAMED;
	if (stream == 2 || (!stream && row->traits & LANTERNE_R_PER_THREAD))
		return LANTERNE_STREAM_PER_THREAD;
	return LANTERNE_STREAM_LEGACY;
}

/* Whoever sets `open` back counts the step: two threads may come to its end at once. */
static inline void end_step(struct lanterne_process *p)
{
	if (__sync_val_compare_and_swap(&p->open, 1, 0) != 1)
		return;
	__sync_fetch_and_add(&p->steps, 1);
	if (!p->seen) {
		__sync_fetch_and_add(&p->silent_steps, 1);
		if (p->replays)
			__sync_fetch_and_add(&p->replay_steps, 1);
	}
	p->seen = 0;
	p->replays = 0;
}

static inline void add_to_process(u32 tgid, bool graph, bool captured)
{
	struct lanterne_process *p = process_of(tgid);

	if (!p)
		return;
	__sync_fetch_and_add(&p->launches, 1);
	if (captured)
		return;
	if (graph) {
		if (p->replays)
			end_step(p);
		p->replays = 1;
	}
	if (!p->open)
		p->open = 1;
}

static inline void add_launch(struct pt_regs *ctx, bool graph)
{
	u64 id = bpf_get_current_pid_tgid();
	struct lanterne_thread *t = thread_of(id);
	struct lanterne_cuda *bin;

	if (!t) {
		count(LANTERNE_N_LOST_CUDA);
		return;
	}
	t->launches++;
	bin = bin_of(id >> 32, t, stream_kind(ctx));
	if (bin)
		__sync_fetch_and_add(graph ? &bin->graph_launches : &bin->launches, 1);
	add_to_process(id >> 32, graph, t->capture != 0);
}

int launch(struct pt_regs *ctx)
{
	add_launch(ctx, false);
	return 0;
}

int graph_launch(struct pt_regs *ctx)
{
	add_launch(ctx, true);
	return 0;
}

int sync_entry(struct pt_regs *ctx)
{
	struct lanterne_thread *t = thread_of(bpf_get_current_pid_tgid());

	if (!t) {
		count(LANTERNE_N_LOST_CUDA);
		return 0;
	}
	t->sync_enter_ns = bpf_ktime_get_ns();
	t->sync_stream = stream_kind(ctx);
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

static inline void end_step_of(u32 tgid)
{
	struct lanterne_process *p = process_of(tgid);

	if (p)
		end_step(p);
}

int sync_return(struct pt_regs *ctx)
{
	u64 now = bpf_ktime_get_ns();
	u64 id = bpf_get_current_pid_tgid();
	struct lanterne_thread *t = thread_of(id);
	struct lanterne_cuda *bin;
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
	if (t->launches)
		end_step_of(id >> 32);
	t->launches = 0;
	bin = bin_of(id >> 32, t, t->sync_stream);
	if (!bin)
		return 0;
	__sync_fetch_and_add(&bin->syncs, 1);
	__sync_fetch_and_add(&bin->sync_ns, blocked);
	__sync_fetch_and_add(&bin->sync_bins[log2_bin(blocked) & (LANTERNE_SYNC_BINS - 1)], 1);
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
