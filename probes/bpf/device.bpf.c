// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The profiler plugin's probe op_done(struct lanterne_op *, size): one record an operation.
 *
 * The agent attaches it only where the note says that the pointer is in the first argument's
 * register. The structure lies on the stack of the thread that tells it, so it is read now. */

BPF_RINGBUF_OUTPUT(device_ring, LANTERNE_DEVICE_RING_PAGES);

int op_done(struct pt_regs *ctx)
{
	u64 id = bpf_get_current_pid_tgid();
	struct lanterne_device *d = device_ring.ringbuf_reserve(sizeof(*d));

	if (!d) {
		count(LANTERNE_N_LOST_DEVICE_RING);
		return 0;
	}
	d->tgid = id >> 32;
	d->tid = (u32)id;
	if (bpf_probe_read_user(d->op, sizeof(d->op), (void *)first_argument(ctx))) {
		device_ring.ringbuf_discard(d, NO_WAKEUP);
		count(LANTERNE_N_LOST_READ);
		return 0;
	}
	if ((u8)(d->op[11] >> 24) != LANTERNE_OP_VERSION) { /* byte 91 */
		device_ring.ringbuf_discard(d, NO_WAKEUP);
		count(LANTERNE_N_LOST_DEVICE_VERSION);
		return 0;
	}
	device_ring.ringbuf_submit(d, NO_WAKEUP);
	count(LANTERNE_N_DEVICE_SUBMITTED);
	return 0;
}
