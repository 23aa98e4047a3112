"""The root file system and the kernel of a machine, built once and kept in build/vm.

Debian packages are downloaded and unpacked by mmdebstrap and never configured: the same steps work
for every architecture, and nothing of a foreign one has to run. Needs root.
"""

from __future__ import annotations

import hashlib
import lzma
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.vm.machines import MIRROR, MODULES, PACKAGES, SUITE, Architecture, Machine

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "vm"
IMAGE_BYTES = "3G"  # sparse
TEST_REQUIREMENTS = ("pytest", "pytest-timeout")

_PASSWD = "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n"
_GROUP = "root:x:0:\nnogroup:x:65534:\n"


class VmError(Exception):
    """What could not be built or booted, and where to look."""


def command(arguments: list[str], log: Path) -> None:
    """Runs a program at low priority, its output into ``log``; raises VmError with its end."""
    with log.open("w") as out:
        done = subprocess.run(
            ["nice", "-n", "10", *arguments], stdout=out, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-8:])
        raise VmError(f"{arguments[0]} failed ({done.returncode}), see {log}:\n{end}")


def requirements() -> list[str]:
    """What the tests need of PyPI, by pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    agent = project["optional-dependencies"]["agent"]
    return [*project["dependencies"], *agent, *TEST_REQUIREMENTS]


def root_image(arch: Architecture) -> Path:
    """An ext4 image with Python, bcc, gcc and the tests' wheels below /opt/site."""
    init = (HERE / "guest" / "init").read_bytes()
    stamp = _digest(arch, SUITE, PACKAGES, requirements(), init, Path(__file__).read_bytes())
    folder = BUILD / f"root-{arch.debian}"
    with _kept(folder, stamp) as fresh:
        if fresh:
            with tempfile.TemporaryDirectory(dir=BUILD) as temporary:
                tree = Path(temporary) / "root"
                _unpack(tree, arch, PACKAGES, SUITE, folder / "packages.log")
                _furnish(tree, arch, folder / "wheels.log")
                arguments = ["-q", "-t", "ext4", "-O", "^metadata_csum", "-d", str(tree)]
                image = str(folder / "root.ext4")
                command(["mke2fs", *arguments, image, IMAGE_BYTES], folder / "mke2fs.log")
    return folder / "root.ext4"


def kernel(machine: Machine) -> Path:
    """A folder with ``vmlinuz``, ``initrd``, ``config`` and ``release`` (a line of text)."""
    first = (HERE / "guest" / "first-init").read_bytes()
    stamp = _digest(machine, MODULES, first, Path(__file__).read_bytes())
    folder = BUILD / f"kernel-{machine.name}"
    with _kept(folder, stamp) as fresh:
        if fresh:
            with tempfile.TemporaryDirectory(dir=BUILD) as temporary:
                tree = Path(temporary) / "root"
                packages = (machine.kernel, "busybox-static")
                log = folder / "packages.log"
                _unpack(tree, machine.architecture, packages, machine.suite, log)
                (image,) = (tree / "boot").glob("vmlinuz-*")
                release = image.name.removeprefix("vmlinuz-")
                shutil.copy(image, folder / "vmlinuz")
                shutil.copy(tree / "boot" / f"config-{release}", folder / "config")
                (folder / "release").write_text(release + "\n")
                _initrd(tree, release, folder)
    return folder


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr((MIRROR, sys.version_info[:2], parts)).encode()).hexdigest()


@contextmanager
def _kept(folder: Path, stamp: str) -> Iterator[bool]:
    """True where the folder must be made anew; the stamp is written when that went well."""
    file = folder / "stamp"
    if file.exists() and file.read_text() == stamp:
        yield False
        return
    print(f"vm: making {folder.relative_to(ROOT)}", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    yield True
    file.write_text(stamp)


def _unpack(
    tree: Path, arch: Architecture, packages: tuple[str, ...], suite: str, log: Path
) -> None:
    sources = [f"deb {MIRROR} {SUITE} main"]
    wanted = list(packages)
    if suite != SUITE:
        sources.append(f"deb {MIRROR} {suite} main")
        wanted[0] += f"/{suite}"
    command(
        [
            "mmdebstrap", "--variant=extract", "--format=directory",
            f"--architectures={arch.debian}", f"--include={','.join(wanted)}",
            SUITE, str(tree), *sources,
        ],
        log,
    )  # fmt: skip


def _furnish(tree: Path, arch: Architecture, log: Path) -> None:
    """What the packages' own scripts would do, as far as the tests need it, and the wheels."""
    (tree / "etc/passwd").write_text(_PASSWD)
    (tree / "etc/group").write_text(_GROUP)
    shutil.copy(HERE / "guest" / "init", tree / "lanterne-init")
    shutil.copy(HERE / "guest" / "init", tree / "sbin" / "init")
    for name in ("awk", "cc"):
        link = tree / "usr/bin" / name
        if not link.exists():
            link.symlink_to({"awk": "mawk", "cc": "gcc"}[name])
    platforms = [f"--platform={one}" for one in arch.wheels]
    command(
        [
            sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check",
            "--no-compile", "--target", str(tree / "opt/site"), *platforms,
            "--python-version=3.11", "--implementation=cp", "--only-binary=:all:",
            *requirements(),
        ],
        log,
    )  # fmt: skip
    _compile(tree, log.with_name("compileall.log"))


def _compile(tree: Path, log: Path) -> None:
    """Bytecode is the same on every architecture; emulated, its making takes minutes."""
    if sys.version_info[:2] != (3, 11):
        return
    folders = [tree / name for name in ("opt/site", "usr/lib/python3", "usr/lib/python3.11")]
    command(
        [
            sys.executable, "-m", "compileall", "-q", "-j", "2", "-s", str(tree), "-p", "/",
            "--invalidation-mode", "unchecked-hash", "-x", "test|lib2to3",
            *map(str, folders),
        ],
        log,
    )  # fmt: skip


def _initrd(tree: Path, release: str, folder: Path) -> None:
    modules = tree / "lib/modules" / release
    if not modules.exists():
        modules = tree / "usr/lib/modules" / release
    base = modules.parents[2]
    command(["depmod", "-b", str(base), release], folder / "depmod.log")
    content = folder / "initrd.tree"
    for name in ("bin", "dev", "proc", "root", "modules"):
        (content / name).mkdir(parents=True)
    shutil.copy(next(tree.glob("**/bin/busybox")), content / "bin/busybox")
    shutil.copy(HERE / "guest" / "first-init", content / "init")
    order = _load_order((modules / "modules.dep").read_text())
    for path in order:
        data = (modules / path).read_bytes()
        if path.endswith(".xz"):
            data = lzma.decompress(data)
        (content / "modules" / Path(path).name.removesuffix(".xz")).write_bytes(data)
    names = [Path(path).name.removesuffix(".xz") for path in order]
    (content / "modules/order").write_text("".join(f"{name}\n" for name in names))
    script = f"cd {content} && find . | cpio --quiet -o -H newc >{folder}/initrd"
    command(["bash", "-euo", "pipefail", "-c", script], folder / "cpio.log")
    shutil.rmtree(content)


def _load_order(text: str) -> list[str]:
    """Of MODULES and what they need, each after its needs. Built-in ones are not listed."""
    needs = {line.partition(":")[0]: line.partition(":")[2].split() for line in text.splitlines()}
    by_name = {Path(path).name.partition(".")[0].replace("-", "_"): path for path in needs}
    order: list[str] = []
    for name in MODULES:
        path = by_name.get(name)
        if path is None:
            continue
        # modules.dep lists what must be loaded first last.
        order += [one for one in [*reversed(needs[path]), path] if one not in order]
    return order
