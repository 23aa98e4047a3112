"""The file that names the ports in use (--ports-file), for whoever started the collector."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from lanterne.collector.errors import ConfigError


def write(path: Path, ports: Mapping[str, int]) -> None:
    """Renamed into place, so that a reader never sees half of it."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(json.dumps(ports) + "\n")
        part.replace(path)
    except OSError as error:
        raise ConfigError(
            f"--ports-file {path}: cannot be written ({error.strerror}); name a file in a folder "
            "that exists and can be written"
        ) from error
