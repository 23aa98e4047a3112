"""What the chart hands to Prometheus and Grafana is what is in its folders."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("helm_python", reason="make test-helm has Helm's engine")

import yaml

from tests.helm.chart import CHART, render, the

pytestmark = pytest.mark.helm


def rules(**more: str) -> dict:  # type: ignore[type-arg]
    values = {"monitoring": {"prometheusRule": {"enabled": True, **more}}}
    spec: dict = the(render(values), "PrometheusRule")["spec"]  # type: ignore[type-arg]
    return spec


def test_rules_are_those_of_the_file() -> None:
    assert rules() == yaml.safe_load((CHART / "rules" / "lanterne.rules.yaml").read_text())


def test_runbooks_lead_where_they_are_served() -> None:
    base = "https://runbooks.example.org/lanterne/"
    plain = yaml.safe_dump(rules())
    moved = yaml.safe_dump(rules(runbooks=base))
    urls = re.findall(r"runbook_url: (\S+)", moved)
    assert len(urls) > 20
    assert all(url.startswith(base + "Lanterne") for url in urls)
    assert moved == plain.replace("docs/runbooks/", base)


def test_dashboards_come_as_they_are() -> None:
    objects = render({"monitoring": {"dashboards": {"enabled": True}}})
    (found,) = [
        o for o in objects
        if o["kind"] == "ConfigMap" and o["metadata"]["name"].endswith("-dashboards")
    ]  # fmt: skip
    folder = {p.name: p.read_text() for p in (CHART / "dashboards").glob("*.json")}
    assert len(folder) == 4
    assert found["data"] == folder
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
