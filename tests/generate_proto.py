"""Generate proto/*_pb2*.py from proto/*.proto (``make proto``).

``--check DIR`` writes into DIR instead; tests/contract compares that with what is committed.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
NAMES = (
    "telemetry_pb2.py",
    "telemetry_pb2.pyi",
    "telemetry_pb2_grpc.py",
    "pod_resources_pb2.py",
    "pod_resources_pb2.pyi",
)


def generate(into: Path) -> None:
    """Write the generated files into `into`."""
    with tempfile.TemporaryDirectory() as tmp:
        # The virtual path makes the generated import `from lanterne.proto import telemetry_pb2`.
        args = [
            "protoc",
            f"-Ilanterne/proto={ROOT / 'proto'}",
            f"--python_out={tmp}",
            f"--pyi_out={tmp}",
            f"--grpc_python_out={tmp}",
            "lanterne/proto/telemetry.proto",
            "lanterne/proto/pod_resources.proto",
        ]
        if protoc.main(args) != 0:
            raise SystemExit("protoc failed on proto/*.proto: see its message above")
        for name in NAMES:
            shutil.copyfile(Path(tmp) / "lanterne" / "proto" / name, into / name)


if __name__ == "__main__":
    generate(Path(sys.argv[2]) if sys.argv[1:2] == ["--check"] else ROOT / "proto")
