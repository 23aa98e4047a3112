// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The life of communicators: rare calls, so clarity before speed. */

#define CONFIG_MAGIC 0xcafebeef
#define CONFIG_HAS_NAME 56 /* ncclConfig_t up to and with commName @48: 2.27 and later */
#define IN_PROGRESS 7      /* ncclInProgress: a communicator with blocking = 0 */

struct open_creation {
	struct lanterne_comm_event event;
	char spare[32]; /* behind event.name: room for the last prefix of a name that is too long */
	u64 sp;
	u64 open;
};
BPF_HASH(open_creations, u64, struct open_creation, 1024);
BPF_ARRAY(no_creation, struct open_creation, 1); /* zeroes to start from */

struct pending_key {
	u64 id;
	u64 number;
};
BPF_HASH(pending_comms, struct pending_key, struct lanterne_comm_event, 1024);

static inline void submit_event(const struct lanterne_comm_event *from)
{
	struct lanterne_comm_event *e = comm_ring.ringbuf_reserve(sizeof(*e));

	if (!e) {
		count(LANTERNE_N_LOST_COMM_RING);
		return;
	}
	__builtin_memcpy(e, from, sizeof(*e));
	comm_ring.ringbuf_submit(e, NO_WAKEUP);
	count(LANTERNE_N_COMM_SUBMITTED);
}

static inline void read_name(struct lanterne_comm_event *e, u64 config)
{
	struct {
		u64 size;
		u32 magic;
		u32 version;
	} head;
	u64 name;

	if (!config || bpf_probe_read_user(&head, sizeof(head), (void *)config))
		return;
	if (head.magic != CONFIG_MAGIC || head.size < CONFIG_HAS_NAME)
		return;
	if (bpf_probe_read_user(&name, 8, (void *)(config + 48)) || !name)
		return;
	if (bpf_probe_read_user_str(e->name, sizeof(e->name), (void *)name) > 1)
		e->flags |= LANTERNE_CF_NAME;
}

static inline void decode_event(struct pt_regs *ctx, struct lanterne_row *row, u16 probe, u64 id,
				struct lanterne_comm_event *e)
{
	struct arguments a;
	u64 v;

	read_arguments(ctx, &a);
	e->time_ns = bpf_ktime_get_ns();
	e->tgid = id >> 32;
	e->tid = (u32)id;
	e->probe = probe;
	e->kind = row->func;
	fetch(&a, &row->source[LANTERNE_COMM], &e->parent);
	fetch(&a, &row->source[LANTERNE_SLOT], &e->slot);
	fetch(&a, &row->source[LANTERNE_N_RANKS], &v);
	e->n_ranks = (s32)v;
	fetch(&a, &row->source[LANTERNE_RANK], &v);
	e->rank = (s32)v;
	if (row->source[LANTERNE_RANK].kind)
		e->flags |= LANTERNE_CF_RANK;
	fetch(&a, &row->source[LANTERNE_COLOR], &v);
	e->color = (s32)v;
	fetch(&a, &row->source[LANTERNE_KEY], &v);
	e->key = (s32)v;
	fetch(&a, &row->source[LANTERNE_ID], &v);
	if (v) {
		if (bpf_probe_read_user(e->id, sizeof(e->id), (void *)v))
			count(LANTERNE_N_LOST_READ);
		else
			e->flags |= LANTERNE_CF_ID;
	}
	fetch(&a, &row->source[LANTERNE_CONFIG], &v);
	read_name(e, v);
}

int comm_entry(struct pt_regs *ctx)
{
	u32 probe = (u32)bpf_get_attach_cookie(ctx), zero = 0;
	u64 id = bpf_get_current_pid_tgid();
	struct lanterne_row *row = row_of(probe);
	struct open_creation *open = open_creations.lookup(&id), *empty;

	if (!row)
		return 0;
	if (open && open->open && ctx->sp < open->sp) {
		count(LANTERNE_N_NESTED);
		return 0;
	}
	empty = no_creation.lookup(&zero);
	if (!empty)
		return 0;
	if (open_creations.update(&id, empty)) {
		count(LANTERNE_N_LOST_SCRATCH);
		return 0;
	}
	open = open_creations.lookup(&id);
	if (!open)
		return 0;
	decode_event(ctx, row, (u16)probe, id, &open->event);
	open->sp = ctx->sp;
	open->open = 1;
	return 0;
}

/* Remembers an event until the end of the group, when its variable is read again. */
static inline void remember_pending(struct lanterne_thread *t, u64 id,
				    const struct lanterne_comm_event *e)
{
	struct pending_key key = {.id = id, .number = t->pending};

	if (t->pending >= LANTERNE_PENDING || pending_comms.update(&key, (void *)e)) {
		count(LANTERNE_N_LOST_SCRATCH);
		return;
	}
	t->pending++;
}

static inline void tell_pending(u64 id, u32 number)
{
	struct pending_key key = {.id = id, .number = number};
	struct lanterne_comm_event *e = pending_comms.lookup(&key);
	u64 comm = 0;

	if (!e)
		return;
	bpf_probe_read_user(&comm, 8, (void *)e->slot);
	if (comm && comm != e->comm) {
		e->comm = comm;
		e->flags &= ~LANTERNE_CF_PENDING;
		submit_event(e);
	}
	pending_comms.delete(&key);
}

/* ncclCommInitAll: one event per communicator. */
static inline void tell_all(struct lanterne_comm_event *e)
{
	u64 slot = e->slot, comm;

	e->flags |= LANTERNE_CF_RANK;
	for (u32 i = 0; i < LANTERNE_PENDING; i++) {
		if (i >= EACH_TIME(e->n_ranks))
			break;
		comm = 0;
		bpf_probe_read_user(&comm, 8, (void *)(slot + 8 * i));
		free_comm(e->tgid, comm);
		e->slot = slot + 8 * i;
		e->comm = comm;
		e->rank = i;
		e->key = i;
		submit_event(e);
	}
}

int comm_return(struct pt_regs *ctx)
{
	u64 id = bpf_get_current_pid_tgid();
	struct open_creation *open = open_creations.lookup(&id);
	struct lanterne_comm_event *e;
	struct lanterne_thread *t;
	u64 comm = 0;

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
	e = &open->event;
	e->duration_ns = bpf_ktime_get_ns() - e->time_ns;
	e->time_ns += e->duration_ns;
	e->rc = (s32)return_value(ctx);
	if (e->rc && e->rc != IN_PROGRESS) {
		submit_event(e);
		goto done;
	}
	if (e->kind == LANTERNE_C_INIT_ALL) {
		tell_all(e);
		goto done;
	}
	bpf_probe_read_user(&comm, 8, (void *)e->slot);
	e->comm = comm;
	free_comm(id >> 32, comm); /* an earlier one at this address whose end was not seen */
	t = thread_of(id);
	/* Color -1 (NCCL_SPLIT_NOCOLOR): no communicator for this rank, now or later. */
	if (e->kind != LANTERNE_C_SPLIT || e->color >= 0) {
		if (!comm)
			e->flags |= LANTERNE_CF_PENDING;
		if (t && t->depth)
			remember_pending(t, id, e);
	}
	submit_event(e);
done:
	open_creations.delete(&id);
	return 0;
}

/* Destroy, abort, finalize, revoke: told at entry, since nothing may follow. */
int comm_call(struct pt_regs *ctx)
{
	u32 probe = (u32)bpf_get_attach_cookie(ctx);
	u64 id = bpf_get_current_pid_tgid();
	struct lanterne_row *row = row_of(probe);
	struct lanterne_comm_event *e;
	u64 comm = first_argument(ctx);

	if (!row)
		return 0;
	if (row->traits & LANTERNE_R_FREES)
		free_comm(id >> 32, comm);
	e = comm_ring.ringbuf_reserve(sizeof(*e));
	if (!e) {
		count(LANTERNE_N_LOST_COMM_RING);
		return 0;
	}
	__builtin_memset(e, 0, sizeof(*e));
	e->time_ns = bpf_ktime_get_ns();
	e->comm = comm;
	e->tgid = id >> 32;
	e->tid = (u32)id;
	e->probe = (u16)probe;
	e->kind = row->func;
	comm_ring.ringbuf_submit(e, NO_WAKEUP);
	count(LANTERNE_N_COMM_SUBMITTED);
	return 0;
}

/* gloo::rendezvous::Context::connectFullMesh(this, std::shared_ptr<Store> &store, ...) as PyTorch
 * calls it. The stores, each a wrapper of the next (offsets seen in torch 2.13, libstdc++):
 *   gloo PrefixStore     store_ @40
 *   c10d GlooStore       store_ @8
 *   c10d PrefixStore     prefix_ std::string @24, store_ @56; once or more
 *   c10d TCPStore        host std::string @24, port u16 @56
 * The joined prefixes, outermost last in the chain and first in the name, are equal on the ranks
 * of a process group and on no others of the job; host and port tell jobs apart. */
#define MAX_PREFIXES 6
#define MAX_PREFIX   24

static inline u64 pointer_at(u64 address)
{
	u64 p = 0;

	bpf_probe_read_user(&p, 8, (void *)address);
	return p;
}

static inline void read_prefixes(struct open_creation *open, u64 store)
{
	struct lanterne_comm_event *e = &open->event;
	char *name = (char *)open + offsetof(struct lanterne_comm_event, name);
	u64 chain[MAX_PREFIXES] = {};
	u64 table = 0, text[2];
	u32 n = 0, at = 0;

	store = pointer_at(pointer_at(store + 40) + 8);
	table = pointer_at(store);
	for (u32 i = 0; i < MAX_PREFIXES; i++) {
		if (!table || pointer_at(store) != table)
			break;
		chain[i] = store;
		store = pointer_at(store + 56);
		n++;
	}
	for (u32 i = 0; i < MAX_PREFIXES; i++) {
		u64 from = chain[MAX_PREFIXES - 1 - i];
		u32 length;

		if (!from)
			continue;
		if (bpf_probe_read_user(text, sizeof(text), (void *)(from + 24)))
			return;
		length = text[1] > MAX_PREFIX ? MAX_PREFIX : (u32)text[1];
		if (!length)
			continue;
		if (at)
			name[at++ & 63] = '/';
		if (bpf_probe_read_user(&name[at & 63], length, (void *)text[0]))
			return;
		at += length;
		if (at > sizeof(open->event.name))
			return; /* no name rather than one that others share */
	}
	if (!n || !at)
		return;
	e->flags |= LANTERNE_CF_NAME;
	if (bpf_probe_read_user(text, sizeof(text), (void *)(store + 24)))
		return;
	if (!text[1] || text[1] > 63)
		return;
	table = pointer_at(store + 56);
	if (!table || table > 0xffff) /* a FileStore or HashStore: no port there */
		return;
	e->key = (s32)table;
	bpf_probe_read_user_str(e->id, 64, (void *)text[0]);
}

int connect_entry(struct pt_regs *ctx)
{
	u32 probe = (u32)bpf_get_attach_cookie(ctx), zero = 0;
	u64 id = bpf_get_current_pid_tgid();
	struct lanterne_row *row = row_of(probe);
	struct open_creation *open, *empty = no_creation.lookup(&zero);
	struct arguments a;
	u64 v;

	if (!row || !empty)
		return 0;
	if (open_creations.update(&id, empty)) {
		count(LANTERNE_N_LOST_SCRATCH);
		return 0;
	}
	open = open_creations.lookup(&id);
	if (!open)
		return 0;
	read_arguments(ctx, &a);
	open->event.time_ns = bpf_ktime_get_ns();
	open->event.tgid = id >> 32;
	open->event.tid = (u32)id;
	open->event.probe = (u16)probe;
	open->event.kind = row->func;
	fetch(&a, &row->source[LANTERNE_COMM], &v);
	/* The row says by how much gloo::Context lies behind rendezvous::Context. */
	open->event.comm = v + row->source[LANTERNE_SCALE].first;
	free_comm(id >> 32, open->event.comm); /* contexts have no end that could be seen */
	if (!read_gloo_context(open->event.comm, &open->event.rank, (u32 *)&open->event.n_ranks))
		open->event.flags |= LANTERNE_CF_RANK;
	read_prefixes(open, pointer_at(a.reg[1]));
	open->sp = ctx->sp;
	open->open = 1;
	return 0;
}

int connect_return(struct pt_regs *ctx)
{
	u64 id = bpf_get_current_pid_tgid();
	struct open_creation *open = open_creations.lookup(&id);

	if (!open || !open->open || !same_frame(ctx, open->sp)) {
		count(LANTERNE_N_ORPHAN_RETURN);
		return 0;
	}
	open->event.duration_ns = bpf_ktime_get_ns() - open->event.time_ns;
	open->event.time_ns += open->event.duration_ns;
	submit_event(&open->event);
	open_creations.delete(&id);
	return 0;
}
