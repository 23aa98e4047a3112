// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* ncclGroupStart and ncclGroupEnd: the number of the outermost group. */

int group_start(struct pt_regs *ctx)
{
	struct lanterne_thread *t = thread_of(bpf_get_current_pid_tgid());

	if (!t)
		return 0;
	if (!t->depth)
		t->group = next_group();
	t->depth++;
	return 0;
}

int group_end(struct pt_regs *ctx)
{
	struct lanterne_thread *t = thread_of(bpf_get_current_pid_tgid());

	if (!t || !t->depth) /* attached inside the group */
		return 0;
	t->depth--;
	if (!t->depth)
		t->group = 0;
	return 0;
}

/* The variables of communicators that were created inside the group are written by now. */
int group_end_return(struct pt_regs *ctx)
{
	u64 id = bpf_get_current_pid_tgid();
	struct lanterne_thread *t = thread_of(id);

	if (!t || t->depth || !t->pending)
		return 0;
	for (u32 i = 0; i < LANTERNE_PENDING; i++) {
		if (i >= EACH_TIME(t->pending))
			break;
		tell_pending(id, i);
	}
	t->pending = 0;
	return 0;
}
