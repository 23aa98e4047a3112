"""What a dashboard is described with; `grafana` makes JSON of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Query:
    expr: str
    legend: str = ""
    instant: bool = False  # the last value only: stats and tables
    buckets: bool = False  # cumulative buckets of a histogram, for a heat map
    exemplars: bool = False


@dataclass(frozen=True)
class Link:
    title: str
    url: str  # with ${…} of Grafana
    new_tab: bool = False


@dataclass(frozen=True)
class Panel:
    title: str
    kind: str  # timeseries, stat, table, heatmap, status-history, state-timeline
    unit: str
    queries: tuple[Query, ...]
    about: str = ""
    width: int = 12
    height: int = 8
    links: tuple[Link, ...] = ()
    low: float | None = None  # of the axis
    high: float | None = None
    warn: float | None = None  # yellow from here, red from `bad`
    bad: float | None = None
    falling: bool = False  # `warn` and `bad` are lower bounds: small is bad
    stacked: bool = False
    names: tuple[tuple[str, str, str], ...] = ()  # value, shown text, colour
    hidden: tuple[str, ...] = ()  # columns of a table that are not shown
    titles: tuple[tuple[str, str], ...] = ()  # field of a table -> its title
    units: tuple[tuple[str, str], ...] = ()  # title -> another unit than the panel's
    points: int = 0  # at most so many in time; 0: as many as fit


def line(
    title: str, unit: str, *queries: tuple[str, str], about: str = "", **options: Any
) -> Panel:
    """A graph over time; queries: (expression, legend)."""
    asked = tuple(Query(expr, legend) for expr, legend in queries)
    return Panel(title, "timeseries", unit, asked, about, **{"width": 8, **options})


def stat(title: str, unit: str, expr: str, about: str, **options: Any) -> Panel:
    """One number, small."""
    return Panel(title, "stat", unit, (Query(expr),), about, width=4, height=4, **options)


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Variable:
    """A choice from label values. `of` is a selector such as 'metric{workload=~"$workload"}'."""

    name: str
    of: str
    label: str = ""  # of the metric; the name if empty
    several: bool = True  # more than one, or all


@dataclass(frozen=True)
class Dashboard:
    uid: str
    title: str
    about: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]
    since: str = "now-1h"
    links: tuple[str, ...] = field(default=())  # uids of other dashboards
