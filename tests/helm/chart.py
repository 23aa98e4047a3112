"""The chart, rendered by Helm's own engine, as Kubernetes objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helm_python
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "lanterne"
RELEASE, NAMESPACE = "lanterne", "monitoring"

Values = dict[str, Any]
Object = dict[str, Any]


def render(values: Values | None = None, *, name: str = RELEASE) -> list[Object]:
    """Every object of a release, in no order."""
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(values or {})
        files = chart.render(values or {}, name=name, namespace=NAMESPACE)
    found = []
    for path, text in files.items():
        if path.endswith(".yaml"):
            found += [o for o in yaml.safe_load_all(text) if o]
    return found


def notes(values: Values | None = None) -> str:
    with helm_python.Chart.load(CHART) as chart:
        return chart.render(values or {}, name=RELEASE, namespace=NAMESPACE)[
            "lanterne/templates/NOTES.txt"
        ]


def the(objects: list[Object], kind: str, name: str = "") -> Object:
    """The only object of a kind (and name)."""
    (found,) = (o for o in objects if o["kind"] == kind and name in ("", o["metadata"]["name"]))
    return found


def container(objects: list[Object], kind: str) -> Object:
    found: Object = the(objects, kind)["spec"]["template"]["spec"]["containers"][0]
    return found


def environment(part: Object, fields: dict[str, str]) -> dict[str, str]:
    """Of a container; `fields`: what the downward API would say, by field path."""
    return {
        e["name"]: e["value"] if "value" in e else fields[e["valueFrom"]["fieldRef"]["fieldPath"]]
        for e in part["env"]
    }
