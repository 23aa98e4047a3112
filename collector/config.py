"""The collector's configuration: defaults, then the TOML file, then the environment, then flags.

One frozen struct a section. Every value is checked on its own, so that an error can name the file
(or variable, or flag), the key, the value and what is allowed there. Unknown keys are refused.
Environment: LANTERNE_COLLECTOR_<SECTION>_<KEY>, such as LANTERNE_COLLECTOR_HTTP_ADDRESS.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec

from lanterne.collector.errors import ConfigError

ENV_PREFIX = "LANTERNE_COLLECTOR_"
ENV_CONFIG = ENV_PREFIX + "CONFIG"  # the path of the file itself, read by main

Address = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^(\[[0-9A-Fa-f:]+\]|[^\s:\[\]]+):(\d{1,4}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d{2}"
        r"|655[0-2]\d|6553[0-5])$",
        description='"host:port" such as "0.0.0.0:4319" or "[::]:4319"; port 0 picks a free port',
    ),
]


def _whole(low: int, high: int) -> Any:
    return msgspec.Meta(ge=low, le=high, description=f"a whole number from {low} to {high}")


def _number(low: float, high: float) -> Any:
    return msgspec.Meta(ge=low, le=high, description=f"a number from {low:g} to {high:g}")


FileName = Annotated[
    str,
    msgspec.Meta(pattern=r"^(/[^\0]*)?$", description="the absolute path of a file, or empty"),
]


class IngestConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The gRPC service that agents report to."""

    address: Address = "0.0.0.0:4319"
    max_nodes: Annotated[int, _whole(1, 65_536)] = 8192
    max_batch_bytes: Annotated[int, _whole(65_536, 1 << 28)] = 8 << 20
    queue_batches: Annotated[int, _whole(1, 65_536)] = 8192
    queue_bytes: Annotated[int, _whole(1 << 20, 1 << 36)] = 256 << 20
    max_connections: Annotated[int, _whole(16, 1 << 20)] = 16_384
    node_batches_per_second: Annotated[float, _number(1, 100_000)] = 100.0
    node_bytes_per_second: Annotated[int, _whole(65_536, 1 << 34)] = 32 << 20
    token_file: FileName = ""


class TlsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of the gRPC side. cert and key: agents know the collector; client_ca: it knows them, too."""

    cert: FileName = ""
    key: FileName = ""
    client_ca: FileName = ""
    shared_names: Annotated[
        tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=253)], ...],
        msgspec.Meta(max_length=64, description="a list of names in agents' certificates"),
    ] = ()


class AnalysisConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long the collector looks back, and how long it waits for what is late."""

    window_seconds: Annotated[float, _number(1, 3600)] = 5.0
    deadline_seconds: Annotated[float, _number(0.5, 300)] = 10.0
    idle_seconds: Annotated[float, _number(5, 86_400)] = 300.0
    ended_seconds: Annotated[float, _number(1, 86_400)] = 10.0
    snapshot_seconds: Annotated[float, _number(0.1, 60)] = 1.0
    min_gain_share: Annotated[float, _number(0, 1)] = 0.02
    hang_seconds: Annotated[float, _number(2, 86_400)] = 10.0


class AdviceConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What advice on experts may assume."""

    seconds: Annotated[float, _number(5, 3600)] = 30.0
    min_gain: Annotated[float, _number(0.001, 1)] = 0.02
    spare_slots: Annotated[int, _whole(0, 64)] = 1
    expert_bytes: Annotated[int, _whole(0, 1 << 40)] = 0
    expert_groups: Annotated[int, _whole(1, 4096)] = 1
    shared_expert_ranks: Annotated[
        str,
        msgspec.Meta(
            pattern=r"^([^=,\s]+=\d{1,5}(,[^=,\s]+=\d{1,5})*)?$",
            description='"workload=rank,workload=rank"',
        ),
    ] = ""


class HttpConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """/metrics, the health pages and the JSON view."""

    address: Address = "0.0.0.0:9478"
    threads: Annotated[int, _whole(1, 64)] = 4
    timeout_seconds: Annotated[int, _whole(1, 300)] = 10
    stale_after_seconds: Annotated[float, _number(1, 3600)] = 10.0
    web_config: FileName = ""


class RecordConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What comes in, kept in a file for `replay`."""

    path: str = ""
    max_bytes: Annotated[int, _whole(1 << 20, 1 << 40)] = 1 << 30
    files: Annotated[int, _whole(1, 1000)] = 4
    sync_seconds: Annotated[float, _number(0, 3600)] = 5.0


class LogConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


class OtlpConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The same metrics pushed to an OpenTelemetry collector, with the extra `otlp`."""

    endpoint: Annotated[
        str,
        msgspec.Meta(
            pattern=r"^(https?://[^\s/]+(/\S*)?)?$",
            description='"http://host:4318/v1/metrics" or https, or empty to push nothing',
        ),
    ] = ""
    interval_seconds: Annotated[float, _number(1, 3600)] = 60.0
    headers_file: FileName = ""


class StateConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What outlives a restart."""

    path: Annotated[
        str,
        msgspec.Meta(
            pattern=r"^(/[^\0]*[^/\0])?$",
            description="the absolute path of a folder, or empty to keep nothing",
        ),
    ] = "/var/lib/lanterne"
    seconds: Annotated[float, _number(1, 3600)] = 30.0


class CollectorConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ingest: IngestConfig = IngestConfig()
    tls: TlsConfig = TlsConfig()
    analysis: AnalysisConfig = AnalysisConfig()
    advice: AdviceConfig = AdviceConfig()
    http: HttpConfig = HttpConfig()
    record: RecordConfig = RecordConfig()
    state: StateConfig = StateConfig()
    otlp: OtlpConfig = OtlpConfig()
    log: LogConfig = LogConfig()


SECTIONS: dict[str, type[msgspec.Struct]] = {
    "ingest": IngestConfig,
    "tls": TlsConfig,
    "analysis": AnalysisConfig,
    "advice": AdviceConfig,
    "http": HttpConfig,
    "record": RecordConfig,
    "state": StateConfig,
    "otlp": OtlpConfig,
    "log": LogConfig,
}


def split_address(address: str) -> tuple[str, int]:
    """("::", 80) from "[::]:80"; the address has been checked before."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def settings() -> Iterator[tuple[str, str]]:
    """Every (section, key) that exists."""
    for section, struct in SECTIONS.items():
        for field in struct.__struct_fields__:
            yield section, field


def load(
    path: Path | None,
    env: Mapping[str, str],
    flags: Mapping[str, object],
) -> CollectorConfig:
    """Reads `path` (None: no file), then `env`, then `flags` ("section.key" -> value).

    Raises ConfigError.
    """
    values: dict[str, dict[str, object]] = {section: {} for section in SECTIONS}
    if path is not None:
        for section, key, value in _read_file(path):
            values[section][key] = _check(str(path), f"{section}.{key}", section, key, value)
    for section, key, name, text in _read_env(env):
        values[section][key] = _check("environment", name, section, key, text, lax=True)
    for dotted, value in flags.items():
        section, key = dotted.split(".", 1)
        flag = f"--{section}-{key}".replace("_", "-")
        values[section][key] = _check("command line", flag, section, key, value, lax=True)
    config = CollectorConfig(**{s: SECTIONS[s](**v) for s, v in values.items()})  # type: ignore[arg-type]
    _check_tls(config.tls)
    return config


def _check_tls(tls: TlsConfig) -> None:
    """Keys that are nothing without each other: half of them must not mean no encryption."""
    if bool(tls.cert) != bool(tls.key):
        raise ConfigError("tls.cert and tls.key belong together: set both, or neither")
    if tls.client_ca and not tls.cert:
        raise ConfigError("tls.client_ca is nothing without tls.cert and tls.key: set them")
    if tls.shared_names and not tls.client_ca:
        raise ConfigError("tls.shared_names are names in certificates: set tls.client_ca")


def _read_file(path: Path) -> Iterator[tuple[str, str, object]]:
    try:
        with path.open("rb") as file:
            document = tomllib.load(file)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); name a readable TOML file with --config"
        ) from error
    except (ValueError, RecursionError) as error:  # not only tomllib's own: numbers, encoding
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    for section, table in document.items():
        if section not in SECTIONS:
            raise ConfigError(
                f"{path}: unknown section [{section}]; allowed are {_listed(SECTIONS)}"
            )
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {section} = {table!r} must be a section, [{section}]")
        for key, value in table.items():
            known = SECTIONS[section].__struct_fields__
            if key not in known:
                raise ConfigError(
                    f"{path}: unknown key {section}.{key} = {value!r}; "
                    f"[{section}] allows {_listed(known)}"
                )
            yield section, key, value


def _read_env(env: Mapping[str, str]) -> Iterator[tuple[str, str, str, str]]:
    names = {f"{ENV_PREFIX}{s}_{k}".upper(): (s, k) for s, k in settings()}
    for name, text in sorted(env.items()):
        if not name.startswith(ENV_PREFIX) or name == ENV_CONFIG:
            continue
        if name not in names:
            raise ConfigError(
                f"environment: unknown variable {name} = {text!r}; allowed are "
                f"{_listed([ENV_CONFIG, *names])}"
            )
        section, key = names[name]
        yield section, key, name, text


def _check(
    source: str, label: str, section: str, key: str, value: object, *, lax: bool = False
) -> object:
    """The value as its field's type; texts are converted where `lax`."""
    kind = get_type_hints(SECTIONS[section], include_extras=True)[key]
    if lax and isinstance(value, str) and "tuple" in str(kind):
        value = [item.strip() for item in value.split(",") if item.strip()]
    try:
        return msgspec.convert(value, kind, strict=not lax)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{source}: {label} = {value!r} is not allowed; it must be {_allowed(kind)}"
        ) from error


def _allowed(kind: Any) -> str:
    for note in getattr(kind, "__metadata__", ()):
        if isinstance(note, msgspec.Meta) and note.description:
            return note.description
    return "one of " + _listed(get_args(kind))


def _listed(names: Any) -> str:
    return ", ".join(str(name) for name in names)
