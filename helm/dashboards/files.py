"""All dashboards, as the files that the chart and a provisioned Grafana take."""

from __future__ import annotations

import json
from pathlib import Path

from helm.dashboards.fleet import FLEET
from helm.dashboards.grafana import dashboard
from helm.dashboards.health import HEALTH
from helm.dashboards.job import JOB
from helm.dashboards.rank import RANK

FOLDER = Path(__file__).resolve().parents[1] / "lanterne" / "dashboards"
DASHBOARDS = (FLEET, JOB, RANK, HEALTH)


def files() -> dict[str, str]:
    """File name -> JSON."""
    titles = {d.uid: d.title for d in DASHBOARDS}
    return {f"{d.uid}.json": json.dumps(dashboard(d, titles), indent=1) + "\n" for d in DASHBOARDS}
