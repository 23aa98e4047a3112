"""What the BPF programs may call: with lockdown=confidentiality the kernel refuses to load any that
reads its memory, and all programs are loaded together."""

from __future__ import annotations

import re
from pathlib import Path

BPF = Path(__file__).resolve().parents[2] / "probes" / "bpf"
# Refused then, or (probe_read, probe_read_str) either by the kernel or by architecture.
REFUSED = re.compile(
    r"\b(bpf_probe_read(_kernel)?(_str)?|bpf_probe_write_user|bpf_override_return|bpf_trace_printk"
    r"|bpf_get_current_task\w*|bpf_snprintf\w*)\s*\("
)


def test_no_program_reads_the_kernels_memory() -> None:
    sources = sorted(BPF.glob("*.bpf.c")) + sorted(BPF.glob("*.h"))
    assert len(sources) > 5
    calls = [
        f"{path.name}: {found[0]}"
        for path in sources
        for found in REFUSED.finditer(path.read_text())
    ]
    assert calls == []
