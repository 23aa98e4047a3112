"""Writes helm/lanterne/dashboards: `python -m helm.dashboards` in the root of the source tree."""

from __future__ import annotations

from pathlib import Path

from helm.dashboards.files import FOLDER, files

Path(FOLDER).mkdir(exist_ok=True)
for name, text in files().items():
    (FOLDER / name).write_text(text)
    print(FOLDER / name)
