"""A tracer with BPF, as the agent would be one: runs under the interpreter that has bcc.

Commands on standard input, one JSON reply line each:

    attach PATH OFFSET SEMAPHORE_OFFSET REGISTER    op_done; offsets in the file, pt_regs field
    read                                            [tgid, struct lanterne_op as hex] of all hits
    detach
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import sys

from bcc import BPF

SOURCE = """
#include <uapi/linux/ptrace.h>
BPF_RINGBUF_OUTPUT(events, 64);
struct event { u32 tgid; u32 pad; char op[96]; };
int op_done(struct pt_regs *ctx) {
    struct event *e = events.ringbuf_reserve(sizeof(*e));
    if (!e) return 0;
    e->tgid = bpf_get_current_pid_tgid() >> 32;
    bpf_probe_read_user(e->op, sizeof(e->op), (void *)ctx->POINTER);
    events.ringbuf_submit(e, 0);
    return 0;
}
"""
UPROBE_MULTI = 48
LINK_CREATE = 28
SYS_BPF = {"x86_64": 321, "aarch64": 280}[os.uname().machine]


def link(program: int, path: str, offset: int, semaphore: int) -> int:
    """A uprobe_multi link that also raises the semaphore in every process that maps the file."""
    name = ctypes.create_string_buffer(path.encode())
    offsets = (ctypes.c_uint64 * 1)(offset)
    semaphores = (ctypes.c_uint64 * 1)(semaphore)
    attribute = struct.pack(
        "IIIIQQQQIII", program, 0, UPROBE_MULTI, 0, ctypes.addressof(name),
        ctypes.addressof(offsets), ctypes.addressof(semaphores), 0, 1, 0, 0,
    )  # fmt: skip
    buffer = ctypes.create_string_buffer(attribute, len(attribute))
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.syscall(SYS_BPF, LINK_CREATE, buffer, len(attribute))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), f"cannot attach at {path}+{offset:#x}")
    return int(descriptor)


def main() -> None:
    bpf, held = None, -1
    rows: list[tuple[int, str]] = []

    def callback(_context: object, data: int, size: int) -> None:
        raw = ctypes.string_at(data, size)
        rows.append((struct.unpack_from("I", raw)[0], raw[8 : 8 + 96].hex()))

    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        words = line.split()
        reply: dict[str, object] = {}
        if words[0] == "attach":
            if bpf is None:
                bpf = BPF(text=SOURCE, cflags=[f"-DPOINTER={words[4]}"])
                bpf["events"].open_ring_buffer(callback)
            program = bpf.load_func("op_done", BPF.KPROBE, attach_type=UPROBE_MULTI)
            held = link(program.fd, words[1], int(words[2]), int(words[3]))
        elif words[0] == "read":
            if bpf is not None:
                bpf.ring_buffer_consume()
            reply, rows = {"rows": rows}, []
        elif words[0] == "detach":
            os.close(held)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
