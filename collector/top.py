"""`lanterne-collector top`: the worst ranks, live in the terminal, over the JSON view."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request

import msgspec
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from lanterne.collector.errors import CollectorError
from lanterne.collector.screen import clean, screen
from lanterne.collector.view import View

TIMEOUT_SECONDS = 5.0
MAX_ANSWER_BYTES = 8 << 20


class FetchError(CollectorError):
    """The collector gave no view; the message says what to do."""


def base_url(address: str) -> str:
    """ "host:port" or an http(s) URL -> URL without trailing slash."""
    url = address if "://" in address else f"http://{address}"
    if not url.startswith(("http://", "https://")):
        raise FetchError(f"--address {address!r} must be host:port or an http URL")
    return url.rstrip("/")


def fetch(address: str, *, limit: int = 100) -> View:
    """Raises FetchError when the collector cannot be reached or does not answer with a view."""
    url = f"{base_url(address)}/api/v1/stragglers?limit={limit}"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer:
            body = answer.read(MAX_ANSWER_BYTES)
        return msgspec.json.decode(body, type=View)
    except urllib.error.HTTPError as error:
        with error:
            text = error.read(4096).decode(errors="replace")
        raise FetchError(f"{url} answered {error.code}: {clean(text)}") from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise FetchError(
            f"No collector answers at {base_url(address)} ({reason}). Start one with "
            "`lanterne-collector`, or name its HTTP address with --address HOST:PORT."
        ) from error
    except (msgspec.DecodeError, ValueError) as error:
        raise FetchError(f"{url} is no Lanterne collector of this version: {error}") from error


def top(address: str, *, once: bool, interval: float, console: Console | None = None) -> int:
    """Shows until Ctrl-C. Returns the exit status; raises FetchError where the address is none."""
    base_url(address)
    out = console or Console(highlight=False)
    if once:
        return _once(out, address)
    try:
        if out.is_terminal:
            _live(out, address, interval)
        else:
            while True:
                out.print(_content(out, address))
                out.print()
                time.sleep(interval)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:  # piped into `head`
        return 0
    return 0


def _once(out: Console, address: str) -> int:
    try:
        shown = fetch(address)
    except FetchError as error:
        out.print(Text(str(error)))
        return 1
    height = out.height if out.is_terminal else 10_000
    out.print(screen(shown, width=out.width, height=height, address=base_url(address)))
    return 0


def _live(out: Console, address: str, interval: float) -> None:
    with Live(
        _content(out, address), console=out, screen=True, auto_refresh=False, transient=True
    ) as live:
        while True:
            time.sleep(interval)
            live.update(_content(out, address), refresh=True)


def _content(out: Console, address: str) -> RenderableType:
    """The screen, or why there is none; asking goes on."""
    try:
        shown = fetch(address)
    except FetchError as error:
        return Text(f"{error}\nTrying again; Ctrl-C ends.", style="bold red")
    return screen(shown, width=out.width, height=out.height, address=base_url(address))
