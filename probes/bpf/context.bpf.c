// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* libcuda: which device a thread's current context belongs to. A launch does not tell; so contexts
 * are remembered when they are made, and the current one when a thread changes or asks for it. What
 * was made or set before the probes came stays unknown: nothing is inferred. */

struct context_key {
	u64 process; /* tgid << 32 */
	u64 context;
};

struct context_call {
	u64 context;
	u64 slot;
	u32 device; /* + 1 */
	u32 call;   /* LANTERNE_X_* */
};

BPF_HASH(contexts, struct context_key, u32, 8192);    /* -> device + 1 */
BPF_HASH(context_calls, u64, struct context_call, 4096); /* under way, by thread */

int context_entry(struct pt_regs *ctx)
{
	u64 id = bpf_get_current_pid_tgid(), device = 0;
	struct lanterne_row *row = row_of((u32)bpf_get_attach_cookie(ctx));
	struct context_call call = {};
	struct arguments a;

	if (!row)
		return 0;
	read_arguments(ctx, &a);
	call.call = row->func;
	fetch(&a, &row->source[LANTERNE_COMM], &call.context);
	fetch(&a, &row->source[LANTERNE_SLOT], &call.slot);
	fetch(&a, &row->source[LANTERNE_RANK], &device);
	call.device = device < 65535 ? (u32)device + 1 : 0;
	if (context_calls.update(&id, &call))
		count(LANTERNE_N_LOST_CUDA);
	return 0;
}

static inline void context_made(u64 id, const struct context_call *call)
{
	struct context_key key = {.process = id >> 32 << 32};
	u32 device = call->device;

	if (bpf_probe_read_user(&key.context, 8, (void *)call->slot)) {
		count(LANTERNE_N_LOST_READ);
		return;
	}
	if (contexts.update(&key, &device))
		count(LANTERNE_N_LOST_CUDA);
}

static inline u16 device_of(u64 id, u64 context)
{
	struct context_key key = {.process = id >> 32 << 32, .context = context};
	u32 *device = contexts.lookup(&key);

	return device ? (u16)*device : 0;
}

static inline void context_asked(struct lanterne_thread *t, u64 slot)
{
	u32 device;

	if (bpf_probe_read_user(&device, 4, (void *)slot))
		count(LANTERNE_N_LOST_READ);
	else
		t->device = device < 65535 ? (u16)(device + 1) : 0;
}

static inline void apply_context(u64 id, struct lanterne_thread *t, const struct context_call *call)
{
	struct context_key key = {.process = id >> 32 << 32, .context = call->context};

	if (call->call == LANTERNE_X_MADE || call->call == LANTERNE_X_ENTERED)
		context_made(id, call);
	if (call->call == LANTERNE_X_ENTERED || call->call == LANTERNE_X_PUSHED)
		t->under = t->device;
	if (call->call == LANTERNE_X_ENTERED)
		t->device = (u16)call->device;
	if (call->call == LANTERNE_X_SET || call->call == LANTERNE_X_PUSHED)
		t->device = device_of(id, call->context);
	if (call->call == LANTERNE_X_POPPED) {
		t->device = t->under;
		t->under = 0; /* one level is remembered */
	}
	if (call->call == LANTERNE_X_ENDED) {
		contexts.delete(&key);
		t->device = 0; /* it may have been the current one */
	}
	if (call->call == LANTERNE_X_ASKED)
		context_asked(t, call->slot);
}

int context_return(struct pt_regs *ctx)
{
	u64 id = bpf_get_current_pid_tgid();
	struct context_call *found = context_calls.lookup(&id), call;
	struct lanterne_thread *t = thread_of(id);

	if (!found) {
		count(LANTERNE_N_ORPHAN_RETURN);
		return 0;
	}
	call = *found;
	context_calls.delete(&id);
	if (!t)
		count(LANTERNE_N_LOST_CUDA);
	else if (!(u32)return_value(ctx))
		apply_context(id, t, &call);
	return 0;
}
