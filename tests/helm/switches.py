"""Combinations of the chart's switches: every pair of settings occurs together in one of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

from tests.helm.chart import Values

DIGEST = "sha256:" + "ab" * 32

# path -> settings to try; None leaves the default.
SWITCHES: dict[str, tuple[Any, ...]] = {
    "agent.enabled": (True, False),
    "collector.enabled": (True, False),
    "collector.replicas": (1, 2),
    "collector.persistence.enabled": (False, True),
    "collector.podDisruptionBudget.enabled": (False, True),
    "collector.webConfigSecret": ("", "lanterne-web"),
    "collector.serviceAccount.create": (True, False),
    "agent.serviceAccount.create": (True, False),
    "agent.webConfigSecret": ("", "lanterne-web"),
    "agent.sysAdmin": (False, True),
    "agent.nvml": (True, False),
    "agent.kubernetes.enabled": (True, False),
    "agent.spool.enabled": (True, False),
    "agent.intake.enabled": (False, True),
    "agent.runtimeClassName": ("", "nvidia"),
    "agent.image.digest": ("", DIGEST),
    "agent.collectors": ([], ["one.example:4319", "two.example:4319"]),
    "agent.seccompProfile": ({"type": "RuntimeDefault"}, {"type": "Unconfined"}),
    "tls.mode": ("none", "secret", "certManager"),
    "tls.certManager.issuerRef": (
        {"name": "", "kind": "ClusterIssuer"},
        {"name": "corp", "kind": "ClusterIssuer"},
    ),
    "token": (
        {"enabled": False},
        {"enabled": True, "value": "s3cret"},
        {"enabled": True, "existingSecret": "mine"},
    ),
    "rbac.create": (True, False),
    "networkPolicy": (
        {"enabled": False},
        {"enabled": True},
        {
            "enabled": True,
            "scrapeFrom": [{"namespaceSelector": {"matchLabels": {"name": "prometheus"}}}],
            "ingestFrom": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
        },
    ),
    "monitoring.serviceMonitor.enabled": (False, True),
    "monitoring.podMonitor": (
        {"enabled": False},
        {"enabled": True},
        {"enabled": True, "basicAuth": {"username": {"name": "web", "key": "user"}}},
    ),
    "monitoring.prometheusRule.enabled": (False, True),
    "monitoring.dashboards.enabled": (False, True),
    "commonLabels": ({}, {"team": "gpu"}),
    "fullnameOverride": ("", "watch"),
    "kubeVersion": ("", "v1.27.3"),
}


def combined() -> list[Values]:
    """The defaults first, then combinations until every pair has occurred."""
    paths = list(SWITCHES)
    open_pairs = {
        ((a, i), (b, j))
        for a, b in combinations(paths, 2)
        for i in range(len(SWITCHES[a]))
        for j in range(len(SWITCHES[b]))
    }
    chosen: list[dict[str, int]] = [dict.fromkeys(paths, 0)]
    while True:
        open_pairs -= set(_pairs(chosen[-1]))
        if not open_pairs:
            return [_values(c) for c in chosen]
        chosen.append(_next(paths, open_pairs))


def _next(
    paths: list[str], open_pairs: set[tuple[tuple[str, int], tuple[str, int]]]
) -> dict[str, int]:
    """Greedy: start from a pair that is open, give each other path what closes most."""
    (a, i), (b, j) = min(open_pairs)
    found = {a: i, b: j}
    for path in paths:
        if path in found:
            continue
        gains = [
            sum(
                (((p, n), (path, k)) in open_pairs) or (((path, k), (p, n)) in open_pairs)
                for p, n in found.items()
            )
            for k in range(len(SWITCHES[path]))
        ]
        found[path] = gains.index(max(gains))
    return found


def _pairs(choice: dict[str, int]) -> Iterator[tuple[tuple[str, int], tuple[str, int]]]:
    ordered = [(path, choice[path]) for path in SWITCHES]
    yield from combinations(ordered, 2)


def _values(choice: dict[str, int]) -> Values:
    values: Values = {}
    for path, index in choice.items():
        *parents, last = path.split(".")
        at = values
        for parent in parents:
            at = at.setdefault(parent, {})
        at[last] = SWITCHES[path][index]
    return values
