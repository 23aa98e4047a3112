"""What costs time and what to try, in the order in which an expert would look.

The input is the JSON view of a collector (`/api/v1/snapshot`, `/api/v1/experts`), live or made from
a recording. Each step either finds something, or says that it looked and found nothing, or that it
could not look and why: what is not known is never reported as sound.
"""

from __future__ import annotations

from collections.abc import Iterator

from lanterne.collector.diagnose_findings import (
    Finding,
    Json,
    Looked,
    gib,
    gpu_name,
    number,
    share,
)
from lanterne.collector.diagnose_stages import stages
from lanterne.collector.report import count

# Of a GPU's memory: engines take 90 % on purpose, and what is left serves libraries and graphs.
MEMORY_FULL = 0.98
MEMORY_TIGHT = 0.95
MEMORY_ROOM = 0.5
SKEW_WARNING = 1.3  # of ranks, max / mean
SKEW_CRITICAL = 2.0
CROSS_NODE = 0.5  # of the bytes
SLOWING = ("thermal", "power_brake", "hw_slowdown", "power_cap")


def diagnose(
    snapshot: Json, experts: Json | None = None, advice: Json | None = None
) -> list[Looked]:
    """Every step, in order."""
    return [
        _memory(snapshot),
        _clocks(snapshot),
        stages(snapshot),
        _skew(snapshot, experts or {}),
        _bytes(snapshot),
        _advice(advice or {}),
        _visibility(snapshot),
    ]


def _memory(snapshot: Json) -> Looked:
    looked = Looked("memory")
    shares: list[tuple[float, str]] = []
    for gpu in snapshot["gpus"]:
        used = gpu["values"].get("memory_used_bytes")
        size = gpu["values"].get("memory_total_bytes")
        if used is None or not size:
            continue
        name = gpu_name(snapshot, gpu)
        shares.append((used / size, name))
        if used / size >= MEMORY_TIGHT:
            full = used / size >= MEMORY_FULL
            looked.findings.append(
                Finding(
                    "memory",
                    "critical" if full else "warning",
                    f"{name}: {share(1 - used / size)} of its memory is left",
                    (f"{gib(used)} of {gib(size)} in use (NVML)",),
                    (
                        "Lower the engine's share of GPU memory or its longest context, so that "
                        "weights and KV cache leave room for communication buffers and graphs.",
                        "Shard the weights over more ranks, or use a smaller type for them or for "
                        "the KV cache.",
                    ),
                )
            )
    if not shares:
        looked.unknown = "no agent reports GPU memory (NVML)"
        return looked
    least, most = min(shares), max(shares)
    looked.seen = f"{count(len(shares), 'GPU')}, {share(least[0])} to {share(most[0])} in use"
    if most[0] - least[0] > 0.2 and least[0] > 0.1:
        looked.findings.append(
            Finding(
                "memory",
                "notice",
                "GPU memory is used unevenly",
                (f"{least[1]} {share(least[0])}, {most[1]} {share(most[0])}",),
                ("Look at the placement of weights and experts: the fullest GPU sets the batch.",),
            )
        )
    elif 0.1 < most[0] <= MEMORY_ROOM:
        looked.findings.append(
            Finding(
                "memory",
                "notice",
                f"Every GPU has at least {share(1 - most[0])} of its memory free",
                (f"the fullest is {most[1]}, {share(most[0])} in use",),
                ("A larger KV cache or batch would fit, or replicas of hot experts.",),
            )
        )
    return looked


def _clocks(snapshot: Json) -> Looked:
    looked = Looked("clocks")
    gpus = snapshot["gpus"]
    if not gpus:
        looked.unknown = "no agent reports GPUs (NVML)"
        return looked
    looked.seen = count(len(gpus), "GPU")
    for gpu in gpus:
        why = [r for r in gpu["throttle_reasons"] if any(word in r for word in SLOWING)]
        if not why:
            continue
        clock, most = (gpu["values"].get(k) for k in ("sm_clock_hertz", "sm_clock_max_hertz"))
        evidence = [f"reasons: {', '.join(why)}"]
        if clock and most:
            evidence.append(f"{clock / 1e6:.0f} of {most / 1e6:.0f} MHz")
        looked.findings.append(
            Finding(
                "clocks",
                "warning",
                f"{gpu_name(snapshot, gpu)} holds its clock down",
                tuple(evidence),
                ("Check cooling, power limit and power supply of this node.",),
            )
        )
    return looked


def _skew(snapshot: Json, experts: Json) -> Looked:
    looked = Looked("skew")
    seen = []
    for comm in snapshot["communicators"]:
        skew = comm["load"].get("skew")
        if skew is None or comm["n_ranks"] < 2:
            continue
        seen.append(f"{comm['name']} {skew:.2f}")
        if skew >= SKEW_WARNING:
            looked.findings.append(
                Finding(
                    "skew",
                    "critical" if skew >= SKEW_CRITICAL else "warning",
                    f"{comm['name']}: the fullest rank gets {skew:.2f} times the mean",
                    (
                        f"Gini {number(comm['load'].get('gini'))}, balancedness "
                        f"{number(comm['load'].get('balancedness'))}, from traffic",
                    ),
                    (
                        "Place experts by load, or replicate the hottest (EPLB); look at the next "
                        "window before and after.",
                    ),
                    1.0 - 1.0 / skew,
                )
            )
    for view in experts.get("experts", ()):
        looked.findings += _experts(view, seen)
    looked.seen = ", ".join(seen[:8])
    if not seen:
        looked.unknown = "no traffic by rank and no expert counts are known"
    return looked


def _experts(view: Json, seen: list[str]) -> Iterator[Finding]:
    summary = view["summary"]
    name = view["model"] or view["workload"] or "experts"
    excess = summary.get("excess_gini_max")
    balanced = summary.get("balancedness_min")
    if excess is None and balanced is None:
        return
    seen.append(f"{name}: balancedness {number(balanced)}, excess Gini {number(excess)}")
    evidence = [f"told by {view['source']}"]
    if view["top"]:
        evidence.append(
            f"hottest experts of the first layer: {', '.join(map(str, view['top'][0]))}"
        )
    if balanced is not None and balanced < 1 / SKEW_WARNING:
        yield Finding(
            "skew",
            "critical" if balanced < 1 / SKEW_CRITICAL else "warning",
            f"{name}: in its worst layer the ranks are {share(balanced)} balanced",
            tuple(evidence),
            ("Replicate or move the hot experts of that layer.",),
            1.0 - balanced,
        )
    elif excess is not None and excess >= 0.2:
        yield Finding(
            "skew",
            "notice",
            f"{name}: experts are loaded more unevenly than chance does it",
            (*evidence, f"excess Gini {excess:.2f} in the worst layer"),
            ("Watch the ranks: uneven experts cost only where they make uneven ranks.",),
        )


def _bytes(snapshot: Json) -> Looked:
    looked = Looked("bytes")
    seen = []
    for comm in snapshot["communicators"]:
        domains = comm["bytes_by_domain"]
        if not domains:
            continue
        sent = {domain: sum(column) for domain, column in domains.items()}
        total = sum(sent.values())
        if total <= 0:
            continue
        shares = {domain: value / total for domain, value in sent.items() if value}
        seen.append(
            f"{comm['name']}: " + ", ".join(f"{d.replace('_', ' ')} {share(s)}"
                                            for d, s in shares.items())
        )  # fmt: skip
        if shares.get("cross_node", 0.0) >= CROSS_NODE:
            looked.findings.append(
                Finding(
                    "bytes",
                    "notice",
                    f"{comm['name']}: {share(shares['cross_node'])} of its bytes cross nodes",
                    (f"{gib(total)} in all, by the traffic matrix and the map of nodes",),
                    (
                        "Group-limited routing, or experts placed so that a token's experts share "
                        "a node.",
                    ),
                )
            )
    looked.seen = "; ".join(seen[:6])
    if not seen:
        looked.unknown = "no traffic by peer is known"
    return looked


def _advice(advice: Json) -> Looked:
    """What the collector's own planning says; it is weighed against doing nothing there."""
    looked = Looked("advice")
    pieces = advice.get("advice", ())
    if not pieces:
        looked.unknown = "no advice: expert counts with a placement are needed for it"
    seen = []
    for piece in pieces:
        if piece["kind"] == "nothing":
            seen.append(f"{piece['workload'] or 'job'}: leave it as it is")
            continue
        gain = piece["gain"] or 0.0
        evidence = [piece["reason"]] if piece["reason"] else []
        evidence += [f"{k} {v:.4g}" for k, v in sorted(piece["evidence"].items()) if v is not None]
        evidence += [
            f"cost: {k} {v:.4g}" for k, v in sorted(piece["cost"].items()) if v is not None
        ]
        text = piece["text"] + (f" {piece['warning']}" if piece["warning"] else "")
        title = f"{piece['workload'] or 'job'}: {piece['kind'].replace('_', ' ')}"
        if gain > 0:
            title += f" may give back {share(gain)} of the time"
        looked.findings.append(
            Finding("advice", "notice", title, tuple(evidence), (text,), max(gain, 0.0))
        )
    looked.seen = ", ".join(seen)
    return looked


def _visibility(snapshot: Json) -> Looked:
    """What could not be seen is a finding too: the steps above rest on what is seen."""
    looked = Looked("visibility")
    nodes = snapshot["nodes"]
    looked.seen = count(len(nodes), "node")
    if not nodes:
        looked.unknown = "no agent reports"
    for node in nodes:
        lost = {cause: n for cause, n in node["events_lost"].items() if n}
        evidence = [f"{n} events lost ({cause})" for cause, n in sorted(lost.items())]
        evidence += [f"{path}" for path in node["libraries_failed"][:3]]
        evidence += [
            f"source {name} fails" for name, ok in sorted(node["sources"].items()) if not ok
        ]
        if not node["connected"]:
            evidence.append("its agent is not connected")
        if evidence:
            looked.findings.append(
                Finding(
                    "visibility",
                    "notice" if node["connected"] else "warning",
                    f"Node {node['name']} is not seen in full",
                    tuple(evidence),
                    ("Run `lanterne-agent doctor` there.",),
                )
            )
    for comm in snapshot["communicators"]:
        if comm["evidence"] == "none" and comm["absent_code"] not in ("", "one_rank", "idle"):
            looked.findings.append(
                Finding(
                    "visibility",
                    "notice",
                    f"{comm['name']}: its waits cannot be known",
                    (comm["absent_reason"],),
                    ("See the table of reasons in docs/metrics.md.",),
                )
            )
    return looked
