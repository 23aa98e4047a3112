"""`lanterne-collector --dry-run`: whether it would start here, and as what, without starting it.

Addresses are bound for a moment and let go; nothing is written.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lanterne.collector import certificates
from lanterne.collector.config import CollectorConfig, split_address
from lanterne.service import web_config
from lanterne.service.errors import LanterneError


@dataclass(frozen=True)
class Finding:
    status: Literal["ok", "info", "warn", "fail"]
    key: str  # of the configuration
    detail: str


def run(config: CollectorConfig, path: str | None, *, recording: bool) -> int:
    """Print the findings and what would happen; 0 where it would start, else 1. `recording`: for
    the command `record`, which neither analyses nor serves pages."""
    found = [
        Finding("ok", "configuration", path or "defaults, no file"),
        *_ingest(config),
        *([] if recording else _pages(config)),
        *_record(config),
    ]
    for one in found:
        print(f"{one.status:<6}{one.key:<22}{one.detail}")
    failed = [one.key for one in found if one.status == "fail"]
    print()
    if failed:
        print(f"It would not start: {', '.join(failed)} (above).")
        return 1
    for line in _would(config, recording):
        print(line)
    return 0


def _ingest(config: CollectorConfig) -> Iterator[Finding]:
    yield _address("ingest.address", config.ingest.address)
    tls = config.tls
    if tls.cert:
        try:
            certificates.read(tls.cert, tls.key, tls.client_ca)
            yield Finding("ok", "tls.cert", f"{tls.cert} and its key belong together")
        except LanterneError as error:
            yield Finding("fail", "tls.cert", str(error))
    else:
        yield Finding("info", "tls.cert", "off: agents report in plaintext")
    if config.ingest.token_file:
        yield _file("ingest.token_file", config.ingest.token_file)


def _pages(config: CollectorConfig) -> Iterator[Finding]:
    yield _address("http.address", config.http.address)
    if config.http.web_config:
        try:
            web_config.read(Path(config.http.web_config))
            yield Finding("ok", "http.web_config", config.http.web_config)
        except LanterneError as error:
            yield Finding("fail", "http.web_config", str(error))
    yield _folder("state.path", config.state.path)
    yield from _otlp(config)


def _otlp(config: CollectorConfig) -> Iterator[Finding]:
    """Whether it could push; not whether the endpoint takes it."""
    otlp = config.otlp
    if not otlp.endpoint:
        return
    if importlib.util.find_spec("opentelemetry") is None:
        remedy = "the extra otlp is missing: pip install 'lanterne[otlp]'"
        yield Finding("fail", "otlp.endpoint", remedy)
    else:
        yield Finding("ok", "otlp.endpoint", otlp.endpoint)
    if otlp.headers_file:
        yield _file("otlp.headers_file", otlp.headers_file)


def _record(config: CollectorConfig) -> Iterator[Finding]:
    record = config.record
    if not record.path:
        return
    folder = Path(record.path).absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        yield Finding("fail", "record.path", f"{folder} is no folder that can be written")
        return
    free, most = shutil.disk_usage(folder).free, record.max_bytes * record.files
    status: Literal["ok", "warn"] = "ok" if free >= most else "warn"
    detail = f"{record.path}: at most {most >> 20} MiB, {free >> 20} MiB are free"
    yield Finding(status, "record.path", detail)


def _address(key: str, address: str) -> Finding:
    host, port = split_address(address)
    try:
        family, kind, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(place)
            server.listen(1)  # two may bind, but only one listens
    except OSError as error:
        why = error.strerror or str(error)
        return Finding("fail", key, f"{address} cannot be listened on: {why}; choose another")
    return Finding("ok", key, f"{address} is free")


def _file(key: str, path: str) -> Finding:
    try:
        with Path(path).open("rb") as file:
            empty = not file.read(1)
    except OSError as error:
        return Finding("fail", key, f"{path} cannot be read: {error.strerror}")
    return Finding("fail", key, f"{path} is empty") if empty else Finding("ok", key, path)


def _folder(key: str, path: str) -> Finding:
    """Without the folder nothing is kept, and all else works."""
    if not path:
        return Finding("info", key, "off: nothing outlives a restart")
    there = Path(path)
    while not there.is_dir() and there != there.parent:
        there = there.parent
    usable = os.access(there, os.W_OK | os.X_OK)
    with suppress(OSError):
        if usable:
            return Finding("ok", key, f"{path}: {shutil.disk_usage(there).free >> 20} MiB are free")
    detail = f"{path}: {there} cannot be written, nothing would outlive a restart"
    return Finding("warn", key, detail)


def _would(config: CollectorConfig, recording: bool) -> Iterator[str]:
    how = "TLS" if config.tls.cert else "plaintext"
    how += ", client certificates required" if config.tls.client_ca else ""
    yield f"It would take the reports of agents at {config.ingest.address} ({how})."
    if not recording:
        yield f"It would serve /metrics, JSON and health pages at {config.http.address}."
    if config.record.path:
        yield f"It would keep what comes in in {config.record.path}."
