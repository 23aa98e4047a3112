// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Maps and the state of threads and communicators.
 *
 * The loader joins the *.bpf.c files into one text, this one first: bcc rewrites map calls only
 * in its main file. State lives in arrays with four-way sets rather than in hash maps, because
 * array look-ups are compiled inline: 5 ns instead of 40 ns. The arrays are mapped by the agent,
 * which frees the slots of dead threads and processes.
 */
#define BPF_LICENSE Dual BSD/GPL
#include <linux/types.h>
#include <uapi/linux/ptrace.h>
#include "record.h"
#include "row.h"

#define NO_WAKEUP 1         /* BPF_RB_NO_WAKEUP: the agent drains on a timer */
#define MMAPABLE  (1 << 10) /* BPF_F_MMAPABLE */

BPF_RINGBUF_OUTPUT(ring, LANTERNE_RING_PAGES);
BPF_RINGBUF_OUTPUT(comm_ring, LANTERNE_COMM_RING_PAGES);
BPF_ARRAY(rows, struct lanterne_row, LANTERNE_ROWS);
BPF_F_TABLE("array", u32, struct lanterne_thread, threads, LANTERNE_THREADS, MMAPABLE);
BPF_F_TABLE("array", u32, struct lanterne_comm, comms, LANTERNE_COMMS, MMAPABLE);
BPF_PERCPU_ARRAY(counters, u64, 32);
BPF_ARRAY(group_number, u64, 1);
BPF_F_TABLE("array", u32, struct lanterne_process, processes, LANTERNE_PROCESSES, MMAPABLE);
BPF_HASH(cuda, struct lanterne_cuda_key, struct lanterne_cuda, 8192);

/* A bound of a loop, read from memory in every round. Otherwise the compiler takes the minimum of
 * both bounds and compares with !=, where verifiers before 6.8 see no end; and with a bound in a
 * register every way out of the loop is a state of its own for them. */
#define EACH_TIME(bound) (*(const volatile u32 *)&(bound))

/* Atomic: a uprobe program can be preempted by another one on the same CPU. */
static inline void count(u32 which)
{
	u64 *n = counters.lookup(&which);
	if (n)
		__sync_fetch_and_add(n, 1);
}

static inline struct lanterne_thread *claim_thread(u64 id, u32 base)
{
	struct lanterne_thread *t;
	u32 at;

	for (u32 way = 1; way < 4; way++) {
		at = base | way;
		t = threads.lookup(&at);
		if (t && t->id == id)
			return t;
	}
	for (u32 way = 0; way < 4; way++) {
		at = base | way;
		t = threads.lookup(&at);
		if (t && !t->id && !__sync_val_compare_and_swap(&t->id, 0, id))
			return t;
	}
	return NULL;
}

static inline struct lanterne_thread *thread_of(u64 id)
{
	u32 base = ((u32)id << 2) & (LANTERNE_THREADS - 1);
	struct lanterne_thread *t = threads.lookup(&base);

	if (t && t->id == id)
		return t;
	return claim_thread(id, base);
}

static inline struct lanterne_process *claim_process(u32 tgid, u32 base)
{
	struct lanterne_process *p;
	u32 at;
	u64 was;

	for (u32 way = 1; way < 4; way++) {
		at = base | way;
		p = processes.lookup(&at);
		if (p && p->tgid == tgid)
			return p;
	}
	for (u32 way = 0; way < 4; way++) {
		at = base | way;
		p = processes.lookup(&at);
		if (!p)
			return NULL;
		if (p->tgid)
			continue;
		was = __sync_val_compare_and_swap(&p->tgid, 0, tgid);
		if (!was || was == tgid)
			return p;
	}
	count(LANTERNE_N_LOST_CUDA);
	return NULL;
}

static inline struct lanterne_process *process_of(u32 tgid)
{
	u32 base = (tgid << 2) & (LANTERNE_PROCESSES - 1);
	struct lanterne_process *p = processes.lookup(&base);

	if (p && p->tgid == tgid)
		return p;
	return claim_process(tgid, base);
}

static inline u64 comm_key(u32 tgid, u64 comm)
{
	return comm ^ (u64)tgid << 42;
}

static inline u32 comm_base(u64 key)
{
	return (u32)((key >> 4) * 0x9E3779B97F4A7C15ULL >> 50) & (LANTERNE_COMMS - 4);
}

/* Two threads may meet here with one communicator: they claim in the same order, so the second
 * finds what the first has written. A foreign key that happens to be equal (pointers in other
 * processes that differ only above bit 42) is told apart by tgid. */
static inline struct lanterne_comm *claim_comm(u64 key, u32 tgid, u32 base, bool *fresh)
{
	struct lanterne_comm *c;
	u32 at;
	u64 was;

	for (u32 way = 1; way < 4; way++) {
		at = base | way;
		c = comms.lookup(&at);
		if (c && c->key == key && (c->tgid == tgid || !c->tgid))
			return c;
	}
	for (u32 way = 0; way < 4; way++) {
		at = base | way;
		c = comms.lookup(&at);
		if (!c)
			return NULL;
		if (c->key)
			continue;
		was = __sync_val_compare_and_swap(&c->key, 0, key);
		if (!was) {
			c->tgid = tgid;
			*fresh = true;
			return c;
		}
		if (was == key && (c->tgid == tgid || !c->tgid))
			return c;
	}
	return NULL;
}

static inline struct lanterne_comm *comm_of(u32 tgid, u64 comm, bool *fresh)
{
	u64 key = comm_key(tgid, comm);
	u32 base = comm_base(key);
	struct lanterne_comm *c = comms.lookup(&base);

	if (c && c->key == key && c->tgid == tgid)
		return c;
	return claim_comm(key, tgid, base, fresh);
}

static inline void free_comm(u32 tgid, u64 comm)
{
	u64 key = comm_key(tgid, comm);
	u32 base = comm_base(key);

	for (u32 way = 0; way < 4; way++) {
		u32 at = base | way;
		struct lanterne_comm *c = comms.lookup(&at);

		if (!c || c->key != key || c->tgid != tgid)
			continue;
		c->seq = 0;
		c->p2p = 0;
		c->p2p_group = 0;
		c->n_ranks = 0;
		c->rank = 0;
		c->tgid = 0;
		c->key = 0;
		return;
	}
}

static inline u32 next_group(void)
{
	u32 zero = 0;
	u64 *n = group_number.lookup(&zero);
	u32 number;

	if (!n)
		return 0;
	number = (u32)__sync_fetch_and_add(n, 1) + 1;
	return number ? number : (u32)__sync_fetch_and_add(n, 1) + 1;
}

struct arguments {
	u64 reg[8];
	u64 sp;
};

static inline void read_arguments(struct pt_regs *ctx, struct arguments *a)
{
#if defined(__TARGET_ARCH_arm64) || defined(__aarch64__)
	a->reg[0] = ctx->regs[0];
	a->reg[1] = ctx->regs[1];
	a->reg[2] = ctx->regs[2];
	a->reg[3] = ctx->regs[3];
	a->reg[4] = ctx->regs[4];
	a->reg[5] = ctx->regs[5];
	a->reg[6] = ctx->regs[6];
	a->reg[7] = ctx->regs[7];
#else
	a->reg[0] = ctx->di;
	a->reg[1] = ctx->si;
	a->reg[2] = ctx->dx;
	a->reg[3] = ctx->cx;
	a->reg[4] = ctx->r8;
	a->reg[5] = ctx->r9;
	a->reg[6] = 0;
	a->reg[7] = 0;
#endif
	a->sp = ctx->sp;
}

static inline u64 first_argument(struct pt_regs *ctx)
{
#if defined(__TARGET_ARCH_arm64) || defined(__aarch64__)
	return ctx->regs[0];
#else
	return ctx->di;
#endif
}

static inline u64 return_value(struct pt_regs *ctx)
{
#if defined(__TARGET_ARCH_arm64) || defined(__aarch64__)
	return ctx->regs[0];
#else
	return ctx->ax;
#endif
}

/* 0, and *value; or a negative number if user memory could not be read. */
static inline int fetch(const struct arguments *a, const struct lanterne_source *s, u64 *value)
{
	u32 width = s->width == 4 ? 4 : 8;
	u64 v = 0, base;
	int err = 0;

	if (s->kind == LANTERNE_S_REGISTER) {
		v = a->reg[s->reg & 7];
	} else if (s->kind == LANTERNE_S_STACK) {
		err = bpf_probe_read_user(&v, width, (void *)(a->sp + s->first));
	} else if (s->kind == LANTERNE_S_STACK_ADDR) {
		v = a->sp + s->first;
	} else if (s->kind == LANTERNE_S_MEMORY || s->kind == LANTERNE_S_CHAIN) {
		base = a->reg[s->reg & 7] + s->first;
		if (s->kind == LANTERNE_S_CHAIN) {
			err = bpf_probe_read_user(&base, 8, (void *)base);
			base += s->second;
		}
		if (!err)
			err = bpf_probe_read_user(&v, width, (void *)base);
	} else if (s->kind == LANTERNE_S_CONSTANT) {
		v = (u64)(s64)s->first;
	}
	if (s->width == 4)
		v = (u32)v;
	*value = v;
	return err;
}

static inline struct lanterne_row *row_of(u32 id)
{
	return rows.lookup(&id);
}
