"""SIGHUP: the configuration is read again, and what can change in flight is taken over.

A file that cannot be used changes nothing: the settings in force stay, the reason is logged, and a
metric says so until a reload succeeds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

log = logging.getLogger(__name__)

C = TypeVar("C", bound=msgspec.Struct)


@dataclass(frozen=True)
class Reloaded:
    """Of the last reload, or of the start: whether it succeeded; when one last did (UNIX s)."""

    success: bool
    succeeded_at: float


class Reloader(Generic[C]):
    """`load`: reads the settings again, raises `refused` where they cannot be used. `live`: the
    keys ("section.key") that `apply` takes over; it gets the settings now in force, in which every
    other key is as it was at the start."""

    def __init__(
        self,
        config: C,
        *,
        load: Callable[[], C],
        apply: Callable[[C], None],
        live: frozenset[str],
        refused: type[Exception],
    ) -> None:
        self.config = config
        self.state = Reloaded(True, time.time())
        self._load, self._apply, self._live, self._refused = load, apply, live, refused

    def reload(self) -> None:
        """Never raises what `load` refuses with."""
        try:
            found = self._load()
        except self._refused as error:
            self.state = Reloaded(False, self.state.succeeded_at)
            log.error(
                "configuration not reloaded; the settings in force stay",
                extra={"reason": str(error)},
            )
            return
        changed = list(changes(self.config, found))
        now = [key for key in changed if key in self._live]
        later = [key for key in changed if key not in self._live]
        self.config = _with(self.config, found, now)
        if now:
            self._apply(self.config)
        self.state = Reloaded(True, time.time())
        log.info("configuration reloaded", extra={"in_force": ",".join(now) or "no change"})
        if later:
            log.warning(
                "these settings take effect after a restart", extra={"keys": ",".join(later)}
            )


def changes(old: msgspec.Struct, new: msgspec.Struct) -> Iterator[str]:
    """The keys ("section.key") with another value."""
    for section in old.__struct_fields__:
        before, after = getattr(old, section), getattr(new, section)
        for key in before.__struct_fields__:
            if getattr(before, key) != getattr(after, key):
                yield f"{section}.{key}"


def _with(old: C, new: C, keys: list[str]) -> C:
    """`old` with these keys of `new`."""
    sections: dict[str, msgspec.Struct] = {}
    for dotted in keys:
        section, _, key = dotted.partition(".")
        before = sections.get(section, getattr(old, section))
        value = getattr(getattr(new, section), key)
        sections[section] = msgspec.structs.replace(before, **{key: value})
    return msgspec.structs.replace(old, **sections)
