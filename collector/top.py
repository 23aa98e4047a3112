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

from lanterne.collector.client import Client
from lanterne.collector.errors import CollectorError
from lanterne.collector.screen import clean, screen
from lanterne.collector.view import View

TIMEOUT_SECONDS = 5.0
MAX_ANSWER_BYTES = 8 << 20
PLAIN = Client()


class FetchError(CollectorError):
    """The collector gave no view; the message says what to do."""


def base_url(address: str, scheme: str = "http") -> str:
    """ "host:port" or an http(s) URL -> URL without trailing slash."""
    url = address if "://" in address else f"{scheme}://{address}"
    if not url.startswith(("http://", "https://")):
        raise FetchError(f"--address {address!r} must be host:port or an http URL")
    return url.rstrip("/")


def fetch(address: str, *, limit: int = 100, client: Client = PLAIN) -> View:
    """Raises FetchError when the collector cannot be reached or does not answer with a view."""
    base = base_url(address, client.scheme)
    url = f"{base}/api/v1/stragglers?limit={limit}"
    request = urllib.request.Request(url, headers=dict(client.headers))
    try:
        with urllib.request.urlopen(
            request, timeout=TIMEOUT_SECONDS, context=client.context
        ) as answer:
            body = answer.read(MAX_ANSWER_BYTES)
        return msgspec.json.decode(body, type=View)
    except urllib.error.HTTPError as error:
        with error:
            text = error.read(4096).decode(errors="replace")
        raise FetchError(f"{url} answered {error.code}: {clean(text)}") from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise FetchError(
            f"No collector answers at {base} ({reason}). Start one with "
            "`lanterne-collector`, or name its HTTP address with --address HOST:PORT."
        ) from error
    except (msgspec.DecodeError, ValueError) as error:
        raise FetchError(f"{url} is no Lanterne collector of this version: {error}") from error


def top(
    address: str,
    *,
    once: bool,
    interval: float,
    console: Console | None = None,
    client: Client = PLAIN,
) -> int:
    """Shows until Ctrl-C. Returns the exit status; raises FetchError where the address is none."""
    address = base_url(address, client.scheme)
    out = console or Console(highlight=False)
    if once:
        return _once(out, address, client)
    try:
        if out.is_terminal:
            _live(out, address, interval, client)
        else:
            while True:
                out.print(_content(out, address, client))
                out.print()
                time.sleep(interval)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:  # piped into `head`
        return 0
    return 0


def _once(out: Console, address: str, client: Client) -> int:
    try:
        shown = fetch(address, client=client)
    except FetchError as error:
        out.print(Text(str(error)))
        return 1
    height = out.height if out.is_terminal else 10_000
    out.print(screen(shown, width=out.width, height=height, address=address))
    return 0


def _live(out: Console, address: str, interval: float, client: Client) -> None:
    with Live(
        _content(out, address, client), console=out, screen=True, auto_refresh=False, transient=True
    ) as live:
        while True:
            time.sleep(interval)
            live.update(_content(out, address, client), refresh=True)


def _content(out: Console, address: str, client: Client) -> RenderableType:
    """The screen, or why there is none; asking goes on."""
    try:
        shown = fetch(address, client=client)
    except FetchError as error:
        return Text(f"{error}\nTrying again; Ctrl-C ends.", style="bold red")
    return screen(shown, width=out.width, height=out.height, address=address)
