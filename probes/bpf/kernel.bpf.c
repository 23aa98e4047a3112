// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The probes of parcagpu: launches that it tells of, and kernels that the GPU has run.
 *
 * Its library keeps nothing and tells nothing while nobody listens to cuda_correlation (it looks at
 * that probe's semaphore), so that one is attached too. Where the arguments are stands in the notes
 * of each build: the agent writes it into a row. */
#include "kernel.h"

BPF_RINGBUF_OUTPUT(kernel_ring, LANTERNE_KERNEL_RING_PAGES);
BPF_HASH(told, u32, struct lanterne_told, 4096);

struct kernel_name {
	char text[LANTERNE_NAME_BYTES];
};
BPF_HASH(kernel_names, u64, struct kernel_name, LANTERNE_KERNEL_NAMES);

static inline struct lanterne_told *told_of(u32 tgid)
{
	struct lanterne_told *t = told.lookup(&tgid), zero = {};

	if (t)
		return t;
	told.insert(&tgid, &zero);
	return told.lookup(&tgid);
}

/* The general registers and the stack pointer: the first 21 words on x86-64, 32 on aarch64. */
#define REGISTERS (sizeof(struct pt_regs) / 8 < 32 ? sizeof(struct pt_regs) / 8 : 32)

/* One operand of a note; `words` are the registers. What cannot be read is 0. */
static inline u64 operand(const u64 *words, const struct lanterne_source *s)
{
	u64 v, base = 0;

	if (s->kind == LANTERNE_S_CONSTANT)
		return (u64)(s64)s->first;
	v = words[s->reg & 31];
	if (s->kind == LANTERNE_S_WORD_MEMORY) {
		base = v + (s64)s->first;
		v = 0;
		if (bpf_probe_read_user(&v, 8, (void *)base)) {
			v = 0;
			/* The last bytes of a page: no more than is there. */
			if (s->width == 4 && bpf_probe_read_user(&v, 4, (void *)base))
				return 0;
		}
	}
	if (s->width == 4)
		v = (u32)v;
	else if (s->width == 2)
		v = (u16)v;
	else if (s->width == 1)
		v = (u8)v;
	return v;
}

int cuda_correlation(struct pt_regs *ctx)
{
	u32 tgid = bpf_get_current_pid_tgid() >> 32;
	struct lanterne_told *t = told_of(tgid);
	struct lanterne_process *p = process_of(tgid);
	u64 launched;

	if (!t) {
		count(LANTERNE_N_LOST_KERNEL_NAMES);
		return 0;
	}
	__sync_fetch_and_add(&t->launches, 1);
	if (!p || !p->launches)
		return 0; /* libcuda is not probed: what it tells cannot be checked */
	launched = p->launches - t->launches;
	/* Launches of other threads that have begun and are not told of yet look missed for a moment,
	 * also when the base is taken: it only goes down. */
	if (!t->based || (s64)(launched - t->base) < 0) {
		t->base = launched;
		t->based = 1;
	}
	t->missed = launched - t->base;
	if (!t->missed)
		t->whole_ns = bpf_ktime_get_ns();
	return 0;
}

int kernel_executed(struct pt_regs *ctx)
{
	struct lanterne_row *row = row_of((u32)bpf_get_attach_cookie(ctx));
	u32 tgid = bpf_get_current_pid_tgid() >> 32;
	struct lanterne_told *t = told_of(tgid);
	union {
		struct kernel_name name;
		u64 words[LANTERNE_NAME_BYTES / 8]; /* the registers, then the name's */
	} u = {};
	struct lanterne_kernel *k;
	u64 key = 0, at, start, end, node;
	u32 correlation, device, stream, graph, seq;

	if (!row)
		return 0;
	if (!t) {
		count(LANTERNE_N_LOST_KERNEL_NAMES);
		return 0;
	}
	/* Copied: into ctx the verifier wants constant offsets, and the helper that reads the kernel's
	 * memory is refused where the kernel is locked down to confidentiality. */
	for (u32 i = 0; i < REGISTERS; i++)
		u.words[i] = ((const u64 *)ctx)[i];
	start = operand(u.words, &row->source[0]);
	end = operand(u.words, &row->source[1]);
	correlation = (u32)operand(u.words, &row->source[2]);
	device = (u32)operand(u.words, &row->source[3]);
	stream = (u32)operand(u.words, &row->source[4]);
	graph = (u32)operand(u.words, &row->source[5]);
	node = operand(u.words, &row->source[6]);
	at = operand(u.words, &row->source[7]);
	__builtin_memset(&u, 0, sizeof(u));
	if (at && bpf_probe_read_user_str(u.name.text, sizeof(u.name.text), (void *)at) > 1) {
		/* Beyond the NUL it is zeros. */
		for (u32 i = 0; i < LANTERNE_NAME_BYTES / 8; i++) {
			key = (key ^ u.words[i]) * 0x9E3779B97F4A7C15ULL;
			key ^= key >> 29;
		}
		key |= 1;
		if (!kernel_names.lookup(&key) && kernel_names.insert(&key, &u.name) &&
		    !kernel_names.lookup(&key))
			count(LANTERNE_N_LOST_KERNEL_NAMES);
	}
	seq = (u32)__sync_fetch_and_add(&t->kernels, 1);
	k = kernel_ring.ringbuf_reserve(sizeof(*k));
	if (!k) {
		count(LANTERNE_N_LOST_KERNEL_RING);
		return 0;
	}
	k->told_ns = bpf_ktime_get_ns();
	k->start_ns = start;
	k->end_ns = end;
	k->correlation = correlation;
	k->device = device;
	k->stream = stream;
	k->graph = graph;
	k->node = node;
	k->name = key;
	k->tgid = tgid;
	k->seq = seq;
	kernel_ring.ringbuf_submit(k, NO_WAKEUP);
	count(LANTERNE_N_KERNELS_SUBMITTED);
	return 0;
}
