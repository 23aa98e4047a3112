"""A View as text for a terminal. Pure: no network, no clock."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lanterne.collector.view import Message, RankRow, View

WIDE = 120  # columns from which more than the essential is shown
MAX_HEADLINES = 3
MAX_MESSAGES = 5
MAX_ADVICE = 3
MAX_MOE = 4
STALLED_SECONDS = 10.0


def screen(shown: View, *, width: int, height: int, address: str) -> RenderableType:
    """Totals, who holds up whom, why anything is missing, the worst ranks as a table, and where
    the same figures are metrics."""
    lines = [_totals(shown), *_headlines(shown), *_messages(shown), *_moe(shown), *_advice(shown)]
    foot = Text(clean(f"metrics: {address}/metrics"), style="dim")
    used = sum(-(-len(line.plain) // max(width, 1)) for line in [*lines, foot]) + 4
    rows = shown.rows[: max(3, height - used)]
    parts: list[RenderableType] = list(lines)
    if rows:
        parts += [Text(), _table(rows, wide=width >= WIDE)]
    parts += [Text(), foot]
    return Group(*parts)


def _totals(shown: View) -> Text:
    totals = shown.totals
    parts = [
        _count(totals.ranks, "rank"),
        f"{totals.nodes_connected}/{_count(totals.nodes, 'node')}",
        _count(totals.communicators, "communicator"),
        f"{totals.events_lost} events lost",
    ]
    if totals.last_window_end is not None and shown.served_at:
        parts.append(f"data {max(0.0, shown.served_at - totals.last_window_end):.1f} s old")
    return Text("lanterne: ", style="bold").append(", ".join(parts), style="not bold")


def _headlines(shown: View) -> Iterator[Text]:
    named = [row for row in shown.rows if row.straggler]
    for row in named[:MAX_HEADLINES]:
        yield Text(headline(row), style="bold red")
        if row.method != "none" and row.found_ratio is not None:
            yield Text(clean(_found(row)), style="dim")
    if shown.totals.stragglers > MAX_HEADLINES:
        yield Text(f"... and {shown.totals.stragglers - MAX_HEADLINES} more", style="red")
    if not named and any(row.straggler_ratio is not None for row in shown.rows):
        yield Text("No straggler: no rank is clearly slower than its peers.", style="green")


def headline(row: RankRow) -> str:
    """The one sentence that matters."""
    slow = "" if row.straggler_ratio is None else f", {row.straggler_ratio:.2f}x its peers' time"
    waits = ""
    if row.waiting and row.others_wait_share is not None:
        waits = (
            f": {row.waiting} of {row.peers} others wait {row.others_wait_share:.0%} of their time"
        )
    cost = "" if row.recoverable_seconds_per_hour is None else f", {_cost(row)}"
    why = f" ({row.why})" if row.why else ""
    return clean(
        f"rank {row.rank} ({_where(row)}{_pod(row)}) holds up {_comm(row)}: "
        f"{row.klass}{slow}{waits}{cost} [{row.evidence}]{why}"
    )


def _cost(row: RankRow) -> str:
    """What would come back in an hour with this rank fixed."""
    seconds = row.recoverable_seconds_per_hour or 0.0
    return f"costs {seconds / 60:.0f} min/h" if seconds >= 60 else f"costs {seconds:.0f} s/h"


_METHOD = {
    "peers": "against {} peers",
    "history": "against what it used to be",
    "intermittent": "now and then, against {} peers",
    "drift": "crept up over hours",
}


def _found(row: RankRow) -> str:
    """What the verdict rests on."""
    how = _METHOD.get(row.method, row.method).format(row.compared)
    score = "" if row.score is None else f", {row.score:.1f} times what noise allows"
    sure = "" if row.confidence is None else f", confidence {row.confidence:.0%}"
    windows = f"{row.windows} window{'s' * (row.windows != 1)}"
    return f"  {row.found_ratio:.2f}x {how}{score}, named for {windows}{sure}"


def _messages(shown: View) -> Iterator[Text]:
    age = shown.served_at - shown.taken_at
    if shown.served_at and age > STALLED_SECONDS:
        yield Text(
            f"The analysis stalled {age:.0f} s ago: see the collector's log.", style="bold red"
        )
    for message in shown.messages[:MAX_MESSAGES]:
        yield Text(clean(_message(message)), style="yellow")
    if len(shown.messages) > MAX_MESSAGES:
        yield Text(f"... and {len(shown.messages) - MAX_MESSAGES} more messages", style="yellow")


def _moe(shown: View) -> Iterator[Text]:
    for text in shown.moe[:MAX_MOE]:
        yield Text(clean(text))
    if len(shown.moe) > MAX_MOE:
        yield Text(f"... and more at /api/v1/experts ({len(shown.moe)})")


def _advice(shown: View) -> Iterator[Text]:
    for text in shown.advice[:MAX_ADVICE]:
        yield Text(clean(f"advice for {text}"), style="cyan")
    if len(shown.advice) > MAX_ADVICE:
        yield Text(f"... and more advice at /api/v1/advice ({len(shown.advice)})", style="cyan")


def _message(message: Message) -> str:
    lead = {
        "hang": "Hang in {}: ",
        "blind": "Waits unknown for {}: ",
        "graphs": "Node {}: ",
        "lost": "Node {}: ",
        "stale": "Node {}: ",
        "library": "Node {}: cannot probe ",
        "empty": "",
    }.get(message.kind, "{}: ")
    return lead.replace("{}", message.subject) + message.text


def _table(rows: tuple[RankRow, ...], *, wide: bool) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), expand=False, header_style="bold underline")
    table.add_column("RANK", justify="right", no_wrap=True)
    table.add_column("NODE:GPU", no_wrap=True, max_width=30 if wide else 16)
    pods = wide and any(row.pod for row in rows)
    if pods:
        table.add_column("POD", no_wrap=True, max_width=30)
    if wide:
        table.add_column("WORKLOAD", no_wrap=True, max_width=18)
    table.add_column("COMM", no_wrap=True, max_width=24 if wide else 12)
    table.add_column("CLASS", no_wrap=True)
    table.add_column("OWN", justify="right", no_wrap=True)
    table.add_column("COSTS/H", justify="right", no_wrap=True)
    table.add_column("WAITING", justify="right", no_wrap=True)
    table.add_column("LOSE", justify="right", no_wrap=True)
    table.add_column("EVIDENCE", no_wrap=True)
    if wide:
        table.add_column("SURE", justify="right", no_wrap=True)
        table.add_column("WHO WAITS", no_wrap=True, max_width=30)
    for row in rows:
        cells = [str(row.rank), _where(row)]
        cells += [row.pod or "-"] if pods else []
        cells += [row.workload] if wide else []
        cells += [
            row.comm,
            row.klass if row.straggler else "-",
            _number(row.straggler_ratio, "{:.2f}x"),
            _duration(row.recoverable_seconds_per_hour),
            f"{row.waiting}/{row.peers}",
            _number(row.others_wait_share, "{:.0%}"),
            row.evidence,
        ]
        if wide:
            cells += [_number(row.confidence, "{:.0%}"), row.waiting_ranks]
        table.add_row(*(Text(clean(c)) for c in cells), style="bold red" if row.straggler else "")
    return table


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _where(row: RankRow) -> str:
    return f"{row.node}:{row.gpu}" if row.gpu else row.node


def _pod(row: RankRow) -> str:
    return f", pod {row.pod}" if row.pod else ""


def _comm(row: RankRow) -> str:
    return f"{row.comm} of {row.workload}" if row.workload else row.comm


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.0f} s" if seconds < 99.5 else f"{seconds / 60:.0f} min"


def clean(text: str) -> str:
    """Names come from the observed jobs: they must not be able to steer the terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)
