"""The virtual machines that the kernel tests run in: one frozen row each."""

from __future__ import annotations

from dataclasses import dataclass

MIRROR = "http://deb.debian.org/debian"
SUITE = "bookworm"

# What the guest needs beside its kernel. Packages are unpacked and not configured, so nothing
# of the other architecture runs here; dependencies come by themselves.
PACKAGES = (
    "base-files", "bash", "binutils", "busybox-static", "coreutils", "dash", "diffutils",
    "findutils", "g++", "gcc", "grep", "gzip", "kmod", "libc-bin", "libc6-dev", "login", "make",
    "mawk", "mount", "procps", "python3", "python3-bpfcc", "runc", "sed", "systemtap-sdt-dev",
    "tar", "util-linux",
)  # fmt: skip

# Of the kernel's modules only these, with what they depend on, are loaded by the first init.
MODULES = ("virtio_pci", "virtio_mmio", "virtio_blk", "ext4", "overlay", "crc32c_generic")


@dataclass(frozen=True)
class Architecture:
    """How Debian, Python and qemu name one architecture. ``options``: qemu's; ``words``: more for
    the kernel's command line."""

    machine: str
    debian: str
    wheels: tuple[str, ...]
    qemu: str
    options: tuple[str, ...]
    console: str
    words: str = ""


ARCHITECTURES = {
    "x86_64": Architecture(
        machine="x86_64",
        debian="amd64",
        wheels=("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_28_x86_64"),
        qemu="qemu-system-x86_64",
        # Five-level page tables make every emulated page walk longer.
        options=("-M", "pc", "-cpu", "max,la57=off"),
        console="ttyS0",
        # It panics where ten ticks of the timer take too long, as on a busy host they do.
        words="no_timer_check",
    ),
    "aarch64": Architecture(
        machine="aarch64",
        debian="arm64",
        wheels=("manylinux2014_aarch64", "manylinux_2_17_aarch64", "manylinux_2_28_aarch64"),
        qemu="qemu-system-aarch64",
        # Pointer authentication stays on, with a hash that is cheap to emulate.
        options=("-M", "virt,gic-version=3", "-cpu", "max,pauth-impdef=on"),
        console="ttyAMA0",
    ),
}


@dataclass(frozen=True)
class Machine:
    """One kernel to test on. ``suite``: where its package comes from, if not from SUITE."""

    name: str
    arch: str
    kernel: str
    methods: tuple[str, ...]
    suite: str = SUITE

    @property
    def architecture(self) -> Architecture:
        return ARCHITECTURES[self.arch]


MACHINES = (
    # No multi-uprobes before 6.6: the perf events are all there is.
    Machine("amd64-6.1", "x86_64", "linux-image-cloud-amd64", ("perf",)),
    Machine("arm64-6.1", "aarch64", "linux-image-cloud-arm64", ("perf",)),
    # Both methods on aarch64, and pages that are not of 4 KiB.
    Machine(
        "arm64-6.12-16k",
        "aarch64",
        "linux-image-arm64-16k",
        ("multi", "perf"),
        suite="bookworm-backports",
    ),
)


def chosen(arch: str) -> tuple[Machine, ...]:
    """Machines of an architecture (x86_64, amd64, aarch64, arm64) or of a name; "": all."""
    same = {"amd64": "x86_64", "arm64": "aarch64"}.get(arch, arch)
    return tuple(one for one in MACHINES if same in ("", one.arch, one.name))
