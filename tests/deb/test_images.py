"""`make test-deb`: the container images built by buildah, on a Debian of mmdebstrap's.

So no image registry is needed: the base is given the name that the Dockerfiles ask for.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deb.system import KEPT, ROOT

# Packing, checking and booting take as long as the machine is busy.
pytestmark = [pytest.mark.deb, pytest.mark.timeout(3600)]

BASE = "docker.io/library/debian:bookworm-slim"


class Buildah:
    """With a store of its own."""

    def __init__(self, folder: Path) -> None:
        self._own = (
            "buildah", "--root", str(folder / "store"), "--runroot", str(folder / "run"),
            "--storage-driver", "overlay",
        )  # fmt: skip

    def __call__(self, *command: str | Path) -> str:
        done = subprocess.run(
            [*self._own, *map(str, command)], capture_output=True, text=True, timeout=1800, cwd=ROOT
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout.strip()

    def run(self, image: str, *command: str) -> str:
        container = self("from", image)
        try:
            return self("run", "--isolation", "chroot", container, "--", *command)
        finally:
            self("rm", container)


def mounts(folder: Path) -> list[str]:
    """A package index whose certificate is not a public one needs its authority inside."""
    authority = os.environ.get("PIP_CERT")
    if not authority:
        return []
    (folder / "pip.conf").write_text("[global]\ncert = /authority.pem\n")
    return ["-v", f"{authority}:/authority.pem:ro", "-v", f"{folder}/pip.conf:/etc/pip.conf:ro"]


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    folder = tmp_path_factory.mktemp("images")
    minimal = KEPT / "minimal-bookworm.tar"
    if not minimal.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        part = minimal.with_name(".minimal.tar")
        subprocess.run(
            ["mmdebstrap", "-q", "--variant=minbase", "bookworm", part,
             "http://deb.debian.org/debian"], check=True, timeout=600, capture_output=True,
        )  # fmt: skip
        part.rename(minimal)
    found = Buildah(folder)
    container = found("from", "scratch")
    found("add", container, minimal, "/")
    found("commit", "--rm", container, BASE)
    for side in ("agent", "collector"):
        found(
            "bud", "--isolation", "chroot", "--network", "host", "--pull-never",
            *mounts(folder), "-f", f"{side}/Dockerfile", "-t", f"lanterne/{side}", ".",
        )  # fmt: skip
    yield found
    found("rmi", "--all", "--force")


def test_the_agents_image(buildah: Buildah) -> None:
    image = "localhost/lanterne/agent"
    assert buildah.run(image, "lanterne-agent", "--version").startswith("lanterne-agent ")
    buildah.run(image, "/usr/bin/python3", "-c", "import bcc")
    code = (
        "import importlib.util as u, lanterne.agent.daemon, lanterne.probes.catalog;"
        "print(u.find_spec('lanterne.collector'), u.find_spec('pip'))"
    )
    assert buildah.run(image, "/opt/lanterne/bin/python", "-c", code) == "None None"
    assert "bcc" in buildah.run(image, "sh", "-c", "lanterne-agent doctor || true")


def test_the_collectors_image(buildah: Buildah) -> None:
    image = "localhost/lanterne/collector"
    assert buildah.run(image, "lanterne-collector", "--version").startswith("lanterne-collector ")
    assert buildah.run(image, "id", "-u") == "65532"
    code = (
        "import importlib.util as u, lanterne.collector.main, lanterne.collector.intake_child;"
        "print(u.find_spec('lanterne.agent'), u.find_spec('pip'))"
    )
    assert buildah.run(image, "/opt/lanterne/bin/python", "-c", code) == "None None"
    buildah.run(image, "sh", "-c", "touch /var/lib/lanterne/x && ! touch /opt/lanterne/x 2>&1")
    found = json.loads(buildah("inspect", "--type", "image", image))
    assert found["OCIv1"]["config"]["Entrypoint"] == ["lanterne-collector"]
