"""What a replayed recording showed, as a report."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from lanterne.collector.replay import Source
from lanterne.collector.replay_bins import Binned
from lanterne.collector.replay_figures import tracks
from lanterne.collector.replay_series import Episode, Experts, Series, Track
from lanterne.collector.report import (
    Bars,
    Document,
    Plot,
    Section,
    Table,
    heat_map,
    seconds,
    share,
    size,
    times,
)

F64 = npt.NDArray[np.float64]

MOST_TRACKS = 8  # drawn; the others are in the table
MOST_BARS = 16
LEAST_BLAME = 0.0005
MOST_MATRIX = 64


def document(source: Source, series: Series) -> Document:
    shown = tracks(series)
    named = series.named()
    sections = [_named(named), _communicators(shown, series.seconds)]
    sections += [_drawn(t, series) for t in shown[:MOST_TRACKS] if t.view.n_ranks > 1]
    sections += _gpu_stages(series)
    sections += [_experts_drawn(e) for _, e in sorted(series.experts.items())]
    sections.append(_unseen(source, series, shown))
    title = "Replay of " + source.files[-1]
    return Document(title, _lead(named, series), _facts(source, series), tuple(sections))


def _lead(named: list[Episode], series: Series) -> str:
    if not named:
        return "No rank was named: nobody was waited for enough, or the waits cannot be known."
    worst = named[0]
    where = f" on {worst.node}" if worst.node else ""
    gpu = f", GPU {worst.gpu}" if worst.gpu else ""
    more = f" {len(named) - 1} more were named." if len(named) > 1 else ""
    return (
        f"Rank {worst.rank} of {worst.comm}{where}{gpu} held the others up: "
        f"{worst.klass.replace('_', ' ')}, {share(worst.blame_share)} of the recording's time "
        f"would come back without it.{more}"
    )


def _facts(source: Source, series: Series) -> tuple[tuple[str, str], ...]:
    nodes = series.last.nodes if series.last is not None else ()
    return (
        ("recording", ", ".join(source.files)),
        ("length", f"{source.seconds:.1f} s"),
        ("nodes", str(len(nodes))),
        ("communicators", str(len(series.tracks))),
        ("batches", f"{source.batches} in {source.frames} frames"),
        ("recorded by", f"lanterne {source.header.version}"),
    )


def _named(named: list[Episode]) -> Section:
    if not named:
        return Section("Who was waited for", ("No rank was named.",))
    rows = tuple(
        (
            e.workload or "–",
            e.comm,
            str(e.rank),
            e.node or "–",
            e.gpu or "–",
            e.klass,
            share(e.blame_share),
            f"{e.ratio:.2f}" if math.isfinite(e.ratio) else "–",
            f"{e.confidence:.2f}",
            e.evidence,
            f"{e.first:.0f}–{e.last:.0f} s",
        )
        for e in named
    )
    columns = ("job", "communicator", "rank", "node", "GPU", "class", "blame", "ratio",
               "confidence", "evidence", "when")  # fmt: skip
    text = (
        "Blame is the share of the whole recording that would come back if this rank alone were "
        "never last. Ratio is its own time over that of its peers, at its highest.",
    )
    return Section("Who was waited for", text, Table(columns, rows))


def _communicators(shown: list[Track], span: float) -> Section:
    rows = tuple(
        (
            t.view.workload or "–",
            t.view.name,
            str(t.view.n_ranks),
            t.evidence,
            share(float(t.wait_total.mean()) / span if span > 0 and len(t.wait_total) else math.nan)
            if t.evidence != "none"
            else "–",
            f"{t.skew:.2f}" if math.isfinite(t.skew) else "–",
            *_mean_times(t),
        )
        for t in shown
    )
    columns = ("job", "communicator", "ranks", "evidence", "waiting", "load skew", "dispatch",
               "combine", "all operations")  # fmt: skip
    return Section("Communicators", (), Table(columns, rows) if rows else None)


def _mean_times(t: Track) -> tuple[str, str, str]:
    texts = []
    for found in (t.view.dispatch, t.view.combine, t.view.durations):
        count = sum(int(h.bins.sum()) for h in found.values())
        total = sum(h.sum_seconds for h in found.values())
        texts.append(seconds(total / count) if count else "–")
    return texts[0], texts[1], texts[2]


def _drawn(t: Track, series: Series) -> Section:
    plots: list[Plot] = []
    ranks = [str(r) for r in range(t.view.n_ranks)]
    if t.evidence != "none":
        plots.append(_over_time("Waiting of each rank, as a share of its time", t.wait, ranks))
        plots.append(_blame(t, series))
    loads, counts = t.load.matrix(), t.loads.matrix()
    if loads.size:
        mean = loads / counts
        plots.append(
            heat_map(
                "Load of each rank: bytes received, over the mean of the ranks",
                mean / np.maximum(mean.mean(axis=0, keepdims=True), 1e-9),
                rows=ranks,
                columns=_times(t.load),
                row_axis="rank",
                column_axis="time",
                show=times,
                relative=True,
            )
        )
    if t.traffic is not None:
        plots.append(_matrix(t.traffic / max(float(np.nansum(counts)), 1.0)))
    name = f"{t.view.workload}: {t.view.name}" if t.view.workload else t.view.name
    return Section(f"{name} ({t.view.n_ranks} ranks)", (), None, tuple(plots))


def _gpu_stages(series: Series) -> list[Section]:
    """Of each job whose kernels are told."""
    sections = []
    for workload in sorted({of for of, _ in series.stages}):
        sums = {
            stage: binned.matrix()
            for (of, stage), binned in sorted(series.stages.items())
            if of == workload
        }
        busy = {
            stage: float(np.nansum(m[2]) / max(float(np.nansum(m[3])), 1e-9))
            for stage, m in sums.items()
        }
        bars = Bars(
            "GPU time by stage, as a share of the time",
            tuple(stage.replace("_", " ") for stage in busy),
            tuple(busy.values()),
            tuple(
                f"{share(v)}, a kernel "
                + seconds(float(np.nansum(sums[k][0]) / max(float(np.nansum(sums[k][1])), 1.0)))
                for k, v in busy.items()
            ),
        )
        sections.append(Section(f"{workload or 'Job'}: on the GPUs", (), None, (bars,)))
    return sections


def _times(binned: Binned) -> list[str]:
    last = max(binned.numbers(), default=-1)
    return [f"{n * binned.width} s" for n in range(last + 1)]


def _over_time(label: str, binned: Binned, ranks: list[str]) -> Plot:
    return heat_map(
        label,
        np.clip(binned.matrix() / binned.width, 0.0, 1.0),
        rows=ranks,
        columns=_times(binned),
        row_axis="rank",
        column_axis="time",
        show=share,
    )


def _blame(t: Track, series: Series) -> Bars:
    order = np.argsort(-t.blame_total, kind="stable")[:MOST_BARS]
    span = max(series.seconds, 1e-9)
    order = order[t.blame_total[order] > LEAST_BLAME * span]
    return Bars(
        "Blame: share of the time that would come back if this rank alone were never last",
        tuple(f"rank {r}" + (f", {t.nodes[r]}" if r < len(t.nodes) and t.nodes[r] else "")
              for r in order.tolist()),
        tuple((t.blame_total[order] / span).tolist()),
        tuple(share(x) for x in (t.blame_total[order] / span).tolist()),
    )  # fmt: skip


def _matrix(traffic: F64) -> Plot:
    """Ranks are put together where there are too many to be seen."""
    n = len(traffic)
    step = -(-n // MOST_MATRIX)
    starts = list(range(0, n, step))
    grouped = np.add.reduceat(np.add.reduceat(traffic, starts, axis=0), starts, axis=1)
    names = [str(s) if step == 1 else f"{s}–{min(s + step, n) - 1}" for s in starts]
    return heat_map(
        "Traffic matrix: bytes in a window, from row to column",
        grouped,
        rows=names,
        columns=names,
        row_axis="rank",
        column_axis="rank",
        show=size,
    )


def _experts_drawn(e: Experts) -> Section:
    load = np.nan_to_num(e.load.matrix())
    mean = np.maximum(load.mean(axis=0, keepdims=True), 1e-9)
    plots: list[Plot] = [
        heat_map(
            "Load of each expert over all layers, over the mean of the experts",
            np.where(load.sum(axis=0, keepdims=True) > 0, load / mean, np.nan),
            rows=[str(x) for x in range(load.shape[0])],
            columns=_times(e.load),
            row_axis=e.view.unit if e.view.unit != "logical" else "expert",
            column_axis="time",
            show=times,
            relative=True,
        )
    ]
    if e.view.load.size:
        layers = e.view.load
        plots.append(
            heat_map(
                "Load of each expert by layer in the last window, over the mean of the layer",
                layers / np.maximum(layers.mean(axis=1, keepdims=True), 1e-9),
                rows=[str(n) for n in e.view.layer],
                columns=[str(x) for x in range(layers.shape[1])],
                row_axis="layer",
                column_axis="expert",
                show=times,
                relative=True,
            )
        )
    rows = tuple((k, f"{v:.3g}") for k, v in sorted(e.view.summary.items()) if math.isfinite(v))
    name = " ".join(x for x in (e.view.workload, e.view.engine, e.view.model) if x)
    return Section(
        f"Experts of {name or 'one model'} (told by {e.view.source})",
        (),
        Table(("measure", "over layers"), rows) if rows else None,
        tuple(plots),
    )


def _unseen(source: Source, series: Series, shown: list[Track]) -> Section:
    text = [
        f"{t.view.name}: no waits, {t.view.absent_reason}"
        for t in shown
        if t.evidence == "none" and t.view.absent_reason
    ][:20]
    for node in series.last.nodes if series.last is not None else ():
        for cause, lost in sorted(node.events_lost.items()):
            if lost:
                text.append(f"{node.name}: {lost} events lost ({cause}).")
    if source.damage.torn_bytes:
        text.append(
            f"The last {source.damage.torn_bytes} bytes of the recording are half a block: it "
            "ended while it was written."
        )
    if source.damage.blocks:
        text.append(f"{source.damage.blocks} damaged blocks of the recording were passed over.")
    if source.refused:
        text.append(f"{source.refused} batches of the recording are not valid.")
    return Section("What could not be seen", tuple(text) or ("Nothing is known to be missing.",))
