"""A real Prometheus for end-to-end tests, with this project's rules, scraping every second."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.parse
from pathlib import Path
from typing import Any

import pytest

from tests.stack import free_port, try_fetch

RULES = Path(__file__).resolve().parents[1] / "helm" / "lanterne" / "rules" / "lanterne.rules.yaml"


def require() -> None:
    """Skips where there is no Prometheus, or fails where CI must have it."""
    if shutil.which("prometheus") is None:
        reason = "prometheus is not installed (Debian: apt-get install prometheus)"
        if os.environ.get("LANTERNE_REQUIRE_KERNEL") == "1":
            pytest.fail(reason)
        pytest.skip(reason)


class Prometheus:
    """Scrapes `targets`, HOST:PORT each, and keeps exemplars."""

    def __init__(self, folder: Path, *targets: str) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        config = folder / "prometheus.yml"
        config.write_text(
            json.dumps(
                {
                    "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                    "rule_files": [str(RULES)],
                    "scrape_configs": [
                        {
                            "job_name": "lanterne",
                            "static_configs": [{"targets": list(targets)}],
                        }
                    ],
                }
            )
        )
        self._log = (folder / "prometheus.log").open("wb")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address={self.url.removeprefix('http://')}",
                "--enable-feature=exemplar-storage",
                "--log.level=warn",
            ],
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def api(self, path: str) -> Any:
        text = try_fetch(f"{self.url}/api/v1/{path}")
        return json.loads(text)["data"] if text else None

    def query(self, promql: str) -> list[dict[str, Any]]:
        data = self.api("query?query=" + urllib.parse.quote(promql))
        found: list[dict[str, Any]] = data["result"] if data else []
        return found
