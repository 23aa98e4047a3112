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


class IngestConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The gRPC service that agents report to."""

    address: Address = "0.0.0.0:4319"
    max_nodes: Annotated[int, _whole(1, 65_536)] = 8192
    max_batch_bytes: Annotated[int, _whole(65_536, 1 << 28)] = 8 << 20
    queue_batches: Annotated[int, _whole(1, 65_536)] = 8192
    queue_bytes: Annotated[int, _whole(1 << 20, 1 << 36)] = 256 << 20


class AnalysisConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long the collector looks back, and how long it waits for what is late."""

    window_seconds: Annotated[float, _number(1, 3600)] = 5.0
    deadline_seconds: Annotated[float, _number(0.5, 300)] = 10.0
    idle_seconds: Annotated[float, _number(5, 86_400)] = 300.0
    ended_seconds: Annotated[float, _number(1, 86_400)] = 15.0
    snapshot_seconds: Annotated[float, _number(0.1, 60)] = 1.0
    min_gain_share: Annotated[float, _number(0, 1)] = 0.02


class HttpConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """/metrics, the health pages and the JSON view."""

    address: Address = "0.0.0.0:9478"
    threads: Annotated[int, _whole(1, 64)] = 4
    timeout_seconds: Annotated[int, _whole(1, 300)] = 10
    stale_after_seconds: Annotated[float, _number(1, 3600)] = 10.0


class LogConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    level: Literal["debug", "info", "warning", "error"] = "info"


class CollectorConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ingest: IngestConfig = IngestConfig()
    analysis: AnalysisConfig = AnalysisConfig()
    http: HttpConfig = HttpConfig()
    log: LogConfig = LogConfig()


SECTIONS: dict[str, type[msgspec.Struct]] = {
    "ingest": IngestConfig,
    "analysis": AnalysisConfig,
    "http": HttpConfig,
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
    return CollectorConfig(**{s: SECTIONS[s](**v) for s, v in values.items()})  # type: ignore[arg-type]


def _read_file(path: Path) -> Iterator[tuple[str, str, object]]:
    try:
        with path.open("rb") as file:
            document = tomllib.load(file)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); name a readable TOML file with --config"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
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
