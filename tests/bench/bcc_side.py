"""What Lanterne is compared with: an empty program, and bcc's own ring callback.

Runs under the interpreter that has bcc. Commands on standard input, one JSON reply line each:

    attach empty|ring PATH OFFSET    one uprobe at the site
    consume                          read all events through bcc's callback: count and nanoseconds
    detach
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import sys
import time

from bcc import BPF

SOURCE = """
BPF_RINGBUF_OUTPUT(events, %(pages)d);
struct event { u64 words[10]; };
int empty(void *ctx) { return 0; }
int ring(void *ctx) {
    struct event *e = events.ringbuf_reserve(sizeof(*e));
    if (!e) return 0;
    e->words[0] = bpf_ktime_get_ns();
    e->words[5] = bpf_get_current_pid_tgid();
    events.ringbuf_submit(e, 1 /* BPF_RB_NO_WAKEUP */);
    return 0;
}
"""
PAGES = 16384
UPROBE_MULTI = 48
LINK_CREATE = 28
SYS_BPF = {"x86_64": 321, "aarch64": 280}[os.uname().machine]


def link(program: int, path: str, offset: int) -> int:
    """A uprobe_multi link; returns its descriptor."""
    name = ctypes.create_string_buffer(path.encode())
    offsets = (ctypes.c_uint64 * 1)(offset)
    attribute = struct.pack(
        "IIIIQQQQIII", program, 0, UPROBE_MULTI, 0, ctypes.addressof(name),
        ctypes.addressof(offsets), 0, 0, 1, 0, 0,
    )  # fmt: skip
    buffer = ctypes.create_string_buffer(attribute, len(attribute))
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.syscall(SYS_BPF, LINK_CREATE, buffer, len(attribute))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), f"cannot attach at {path}+{offset:#x}")
    return int(descriptor)


def main() -> None:
    bpf = BPF(text=SOURCE % {"pages": PAGES})
    counted = 0

    def callback(_context: object, data: int, _size: int) -> None:
        nonlocal counted
        bpf["events"].event(data)
        counted += 1

    bpf["events"].open_ring_buffer(callback)
    held = -1
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        words = line.split()
        reply: dict[str, object] = {}
        if words[0] == "attach":
            kind = BPF.KPROBE
            program = bpf.load_func(words[1], kind, attach_type=UPROBE_MULTI)
            held = link(program.fd, words[2], int(words[3]))
        elif words[0] == "consume":
            counted, start = 0, time.process_time_ns()
            bpf.ring_buffer_consume()
            reply = {"events": counted, "ns": time.process_time_ns() - start}
        elif words[0] == "detach":
            os.close(held)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
