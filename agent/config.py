"""The agent's configuration: defaults < TOML file < environment < flags, every value checked.

The environment variable of a key is ``LANTERNE_AGENT_<SECTION>_<KEY>``, for instance
``LANTERNE_AGENT_WINDOW_SECONDS=0.5``; lists are comma-separated there, or JSON. A key, section or
variable that does not exist is refused: a misspelt setting must not be silently without effect.
``lanterne-agent.toml`` beside this file shows every key with its default.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta

from lanterne.agent.errors import ConfigError

ENV_PREFIX = "LANTERNE_AGENT_"
CONFIG_VARIABLE = "LANTERNE_AGENT_CONFIG"

Address = Annotated[
    str, Meta(pattern=r"^[^\s:]+:\d{1,5}$|^\[[0-9a-fA-F:.%\w]+\]:\d{1,5}$", description="HOST:PORT")
]
Listen = Annotated[
    str,
    Meta(
        pattern=r"^$|^[^\s:]*:\d{1,5}$|^\[[0-9a-fA-F:.]+\]:\d{1,5}$",
        description="HOST:PORT, :PORT for every interface, or empty to switch off",
    ),
]
Name = Annotated[str, Meta(min_length=1, max_length=128, description="a non-empty text")]
FileName = Annotated[
    str, Meta(pattern=r"^(/.*)?$", max_length=1024, description="an absolute path, or empty")
]
Globs = Annotated[tuple[Name, ...], Meta(max_length=256, description="a list of path patterns")]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Node(_Section, frozen=True, kw_only=True):
    # Empty: the host's name. The collector makes a label value of it.
    name: Annotated[
        str,
        Meta(
            pattern=r"^$|^[A-Za-z0-9]([A-Za-z0-9._:-]{0,126}[A-Za-z0-9])?$",
            description="up to 128 letters, digits and ._:-",
        ),
    ] = ""


class Collector(_Section, frozen=True, kw_only=True):
    addresses: Annotated[
        tuple[Address, ...],
        Meta(min_length=1, max_length=16, description="a list of HOST:PORT"),
    ] = ("127.0.0.1:4319",)
    queue_batches: Annotated[int, Meta(ge=1, le=100_000)] = 600
    queue_bytes: Annotated[int, Meta(ge=65_536, le=1 << 32, description="bytes")] = 16 << 20
    heartbeat_seconds: Annotated[float, Meta(ge=0.1, le=60)] = 1.0
    backoff_max_seconds: Annotated[float, Meta(ge=0.1, le=300)] = 5.0
    shutdown_seconds: Annotated[float, Meta(ge=0, le=60)] = 3.0
    token_file: FileName = ""


class Tls(_Section, frozen=True, kw_only=True):
    """Of the connection to the collector: ca alone: we know it; cert and key: it knows us, too."""

    ca: FileName = ""
    cert: FileName = ""
    key: FileName = ""
    server_name: Annotated[
        str, Meta(pattern=r"^[A-Za-z0-9._-]*$", max_length=253, description="a host name, or empty")
    ] = ""


class Window(_Section, frozen=True, kw_only=True):
    seconds: Annotated[float, Meta(ge=0.1, le=60)] = 1.0
    drain_seconds: Annotated[float, Meta(ge=0.002, le=1)] = 0.5
    scan_seconds: Annotated[float, Meta(ge=0.1, le=60)] = 1.0
    group_grace_seconds: Annotated[float, Meta(ge=0.001, le=10)] = 1.0


class Probes(_Section, frozen=True, kw_only=True):
    enabled: bool = True
    method: Literal["auto", "multi", "perf"] = "auto"
    ring_bytes: Annotated[int, Meta(ge=4096, le=1 << 30, description="bytes, a power of two")] = (
        4 << 20
    )
    comm_ring_bytes: Annotated[
        int, Meta(ge=4096, le=1 << 28, description="bytes, a power of two")
    ] = 1 << 20
    device_ring_bytes: Annotated[
        int, Meta(ge=4096, le=1 << 28, description="bytes, a power of two")
    ] = 2 << 20
    kernel_ring_bytes: Annotated[
        int, Meta(ge=4096, le=1 << 28, description="bytes, a power of two")
    ] = 2 << 20
    include: Globs = ()
    exclude: Globs = ()
    look_into: Globs = ("*nccl*", "*NCCL*", "*rccl*", "libtorch_cuda*", "libtorch_hip*")
    interpreter: Name = "/usr/bin/python3"
    drop_privileges: bool = True


class Identity(_Section, frozen=True, kw_only=True):
    workload_variables: Annotated[
        tuple[Name, ...],
        Meta(max_length=32, description="a list of environment variables of the job, best first"),
    ] = ("LANTERNE_WORKLOAD", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "JOB_NAME", "JOB_ID")
    max_communicators: Annotated[int, Meta(ge=16, le=65_000)] = 4096
    roles: Annotated[
        dict[str, Name],
        Meta(max_length=256, description="a table: pattern of a communicator's name = role"),
    ] = {}


class Evidence(_Section, frozen=True, kw_only=True):
    max_launches: Annotated[int, Meta(ge=0, le=65_000)] = 2
    max_sync_age_seconds: Annotated[float, Meta(gt=0, le=1)] = 0.01


class Sources(_Section, frozen=True, kw_only=True):
    nvml: bool = True
    host: bool = True
    ras: bool = True


class Engine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An inference engine whose Prometheus endpoint is scraped."""

    address: Annotated[
        str,
        Meta(
            pattern=r"^(http://)?[^\s:/?#@]+:\d{1,5}(/[^\s?#]*)?$",
            max_length=256,
            description="HOST:PORT or http://HOST:PORT/PATH",
        ),
    ]
    kind: Literal["vllm", "sglang"]
    workload: Annotated[str, Meta(max_length=128)] = ""


class ExpertFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file or folder in which an engine leaves what it knows of its experts."""

    path: Annotated[str, Meta(pattern=r"^/", max_length=1024, description="an absolute path")]
    kind: Literal["sglang_dump", "numpy", "vllm_log", "sglang_log"]
    workload: Annotated[str, Meta(max_length=128)] = ""
    model: Annotated[str, Meta(max_length=128)] = ""
    ranks: Annotated[int, Meta(ge=0, le=65_536)] = 0


class Experts(_Section, frozen=True, kw_only=True):
    socket: Annotated[
        str, Meta(pattern=r"^(/.*)?$", max_length=100, description="an absolute path, or empty")
    ] = "/run/lanterne/intake.sock"
    listen: Annotated[
        str,
        Meta(
            pattern=r"^$|^(127\.\d+\.\d+\.\d+|localhost|\[::1\]):\d{1,5}$",
            description="HOST:PORT of this host only, such as 127.0.0.1:9479, or empty",
        ),
    ] = ""
    max_body_bytes: Annotated[int, Meta(ge=1024, le=64 << 20, description="bytes")] = 4 << 20
    max_per_second: Annotated[float, Meta(gt=0, le=10_000)] = 50.0
    poll_seconds: Annotated[float, Meta(ge=0.2, le=600)] = 5.0
    engines: Annotated[
        tuple[Engine, ...],
        Meta(max_length=64, description="a list of { address, kind, workload }"),
    ] = ()
    files: Annotated[
        tuple[ExpertFile, ...],
        Meta(max_length=64, description="a list of { path, kind, workload, model, ranks }"),
    ] = ()


class Spool(_Section, frozen=True, kw_only=True):
    # Empty: nothing outlives the agent, and memory alone bridges an outage.
    path: Annotated[
        str, Meta(pattern=r"^(/.*)?$", max_length=1024, description="an absolute path, or empty")
    ] = ""
    max_bytes: Annotated[int, Meta(ge=1 << 20, le=1 << 40, description="bytes")] = 256 << 20
    sync_seconds: Annotated[float, Meta(ge=0.05, le=60)] = 1.0


class Kubernetes(_Section, frozen=True, kw_only=True):
    enabled: Literal["auto", "on", "off"] = "auto"
    node_address: Annotated[
        str,
        Meta(
            pattern=r"^$|^(https?://)?[^\s/?#@]+$",
            max_length=256,
            description="HOST, HOST:PORT or http://HOST:PORT of this node's kubelet, or empty",
        ),
    ] = ""
    pod_resources_socket: Annotated[
        str, Meta(pattern=r"^/", max_length=100, description="an absolute path")
    ] = "/var/lib/kubelet/pod-resources/kubelet.sock"
    token_file: Annotated[str, Meta(pattern=r"^/", max_length=1024, description="a path")] = (
        "/var/run/secrets/kubernetes.io/serviceaccount/token"
    )
    ca_file: Annotated[str, Meta(pattern=r"^/", max_length=1024, description="a path")] = (
        "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"
    )


class Metrics(_Section, frozen=True, kw_only=True):
    listen: Listen = "127.0.0.1:9477"
    web_config: FileName = ""


class Log(_Section, frozen=True, kw_only=True):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


class AgentConfig(_Section, frozen=True, kw_only=True):
    """The whole tree; sections are the tables of the TOML file."""

    node: Node = Node()
    collector: Collector = Collector()
    tls: Tls = Tls()
    window: Window = Window()
    probes: Probes = Probes()
    identity: Identity = Identity()
    evidence: Evidence = Evidence()
    sources: Sources = Sources()
    experts: Experts = Experts()
    spool: Spool = Spool()
    kubernetes: Kubernetes = Kubernetes()
    metrics: Metrics = Metrics()
    log: Log = Log()


SECTIONS: dict[str, type[_Section]] = {f.name: f.type for f in msgspec.structs.fields(AgentConfig)}


def load(
    path: Path | None, env: Mapping[str, str], flags: Mapping[str, object] | None = None
) -> AgentConfig:
    """Merge and check; `flags` maps ``"section.key"`` to a value, None values are skipped.

    Raises ConfigError naming the origin (file, variable or flag), the key, the value and what
    is allowed.
    """
    values: dict[str, dict[str, object]] = {name: {} for name in SECTIONS}
    if path is None and env.get(CONFIG_VARIABLE):
        path = Path(env[CONFIG_VARIABLE])
    if path is not None:
        for section, table in _read_toml(path).items():
            _require_section(section, str(path))
            if not isinstance(table, dict):
                raise ConfigError(
                    f"{path}: {section} = {table!r}: {section} is a section; "
                    f"write [{section}] and its keys below"
                )
            for key, value in table.items():
                values[section][key] = _convert(section, key, value, str(path), strict=True)
    for section, key, value, origin in _from_env(env):
        values[section][key] = _convert(section, key, value, origin, strict=False)
    for dotted, flag_value in (flags or {}).items():
        if flag_value is not None:
            section, _, key = dotted.partition(".")
            _require_section(section, f"flag for {dotted}")
            origin = f"flag for {dotted}"
            values[section][key] = _convert(section, key, flag_value, origin, strict=False)
    config = AgentConfig(**{name: SECTIONS[name](**table) for name, table in values.items()})  # type: ignore[arg-type]
    if not config.node.name:
        name = re.sub(r"[^A-Za-z0-9._:-]+", "-", socket.gethostname())[:128].strip("._:-")
        config = msgspec.structs.replace(config, node=Node(name=name or "node"))
    _check_tls(config.tls)
    return config


def _check_tls(tls: Tls) -> None:
    """Keys that are nothing without each other: half of them must not mean no encryption."""
    if bool(tls.cert) != bool(tls.key):
        raise ConfigError("tls.cert and tls.key belong together: set both, or neither")
    if not tls.ca and (tls.cert or tls.server_name):
        raise ConfigError(
            "tls.cert, tls.key and tls.server_name are nothing without tls.ca, the authority of "
            "the collector's certificate: set it"
        )


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(f"{path}: cannot be read: {reason}; check the path") from error
    except (ValueError, RecursionError) as error:  # not only tomllib's own: numbers, encoding
        raise ConfigError(f"{path}: is not valid TOML: {error}") from error


def _from_env(env: Mapping[str, str]) -> list[tuple[str, str, object, str]]:
    found: list[tuple[str, str, object, str]] = []
    for variable, text in env.items():
        if not variable.startswith(ENV_PREFIX) or variable == CONFIG_VARIABLE:
            continue
        section, _, key = variable[len(ENV_PREFIX) :].lower().partition("_")
        origin = f"environment variable {variable}"
        if section not in SECTIONS or key not in SECTIONS[section].__struct_fields__:
            known = [
                f"{ENV_PREFIX}{name}_{field}".upper()
                for name, kind in SECTIONS.items()
                for field in kind.__struct_fields__
            ]
            raise ConfigError(f"{origin}: no such setting{_nearest(variable, known)}")
        found.append((section, key, text, origin))
    return found


def _require_section(section: str, origin: str) -> None:
    if section not in SECTIONS:
        raise ConfigError(
            f"{origin}: unknown section [{section}]{_nearest(section, SECTIONS)}; "
            f"allowed are {', '.join(SECTIONS)}"
        )


def _convert(section: str, key: str, value: object, origin: str, *, strict: bool) -> object:
    kind = SECTIONS[section]
    if key not in kind.__struct_fields__:
        raise ConfigError(
            f"{origin}: unknown key {section}.{key}{_nearest(key, kind.__struct_fields__)}; "
            f"allowed are {', '.join(kind.__struct_fields__)}"
        )
    hint = get_type_hints(kind, include_extras=True)[key]
    if not strict and isinstance(value, str):
        value = _from_text(hint, value)
    try:
        result = msgspec.convert(value, hint, strict=strict)
    except msgspec.ValidationError as error:
        # A pattern tells nobody anything; what it stands for is said in words.
        why = "" if "matching regex" in str(error) else f": {error}"
        raise ConfigError(
            f"{origin}: {section}.{key} = {value!r} is not allowed{why}; "
            f"allowed is {_allowed(hint)}"
        ) from error
    if key.endswith("ring_bytes") and isinstance(result, int) and result & (result - 1):
        raise ConfigError(
            f"{origin}: {section}.{key} = {value!r} is not allowed: the kernel wants a power of "
            f"two; the next is {1 << result.bit_length()}"
        )
    if isinstance(result, (str, tuple)):
        _check_ports(result, hint, f"{origin}: {section}.{key} = {value!r}")
    return result


def _check_ports(result: str | tuple[object, ...], hint: object, what: str) -> None:
    if hint is not Listen and "HOST:PORT" not in _allowed(hint):
        return
    for address in (result,) if isinstance(result, str) else result:
        port = str(address).rpartition(":")[2]
        if port.isdecimal() and int(port) > 65_535:
            raise ConfigError(f"{what} is not allowed: {address}: a port is at most 65535")


def _from_text(hint: object, text: str) -> object:
    """Text of a flag or variable to what msgspec converts: lists split at commas."""
    inner = getattr(hint, "__origin__", hint)
    name = str(inner)
    if "tuple" in name and text.lstrip().startswith("["):  # JSON, for lists of tables
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.json.decode(text)
    if "tuple" in name:
        return [item.strip() for item in text.split(",") if item.strip()]
    if "dict" in name:
        pairs = (item.partition("=") for item in text.split(",") if item.strip())
        return {left.strip(): right.strip() for left, _, right in pairs}
    if inner is bool:
        return {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(
            text.lower(), text.lower()
        )
    return text


def _allowed(hint: object) -> str:
    """What a type admits, in words."""
    meta = next((m for m in getattr(hint, "__metadata__", ()) if isinstance(m, Meta)), None)
    inner = getattr(hint, "__origin__", hint) if meta else hint
    if getattr(inner, "__origin__", None) is Literal or "Literal" in str(inner):
        return " or ".join(repr(choice) for choice in getattr(inner, "__args__", ()))
    if meta is None:
        return {bool: "true or false"}.get(inner, str(inner))  # type: ignore[call-overload, no-any-return]
    words = {int: "a whole number", float: "a number", str: "a text"}
    text = meta.description or words.get(inner, "a value")  # type: ignore[call-overload]
    low = meta.ge if meta.ge is not None else meta.gt
    if low is not None or meta.le is not None:
        text += f" from {low} to {meta.le}" if meta.gt is None else f" above {low} to {meta.le}"
    if meta.min_length and inner is not str:
        text += f", at least {meta.min_length}"
    return str(text)


def _nearest(word: str, known: object) -> str:
    import difflib  # for typing errors only: every agent would keep it in memory

    close = difflib.get_close_matches(word, list(known), n=1)  # type: ignore[call-overload]
    return f"; did you mean {close[0]}?" if close else ""
