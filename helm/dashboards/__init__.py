"""The Grafana dashboards of helm/lanterne/dashboards, described in Python.

A panel is a few lines in `fleet`, `job`, `rank` or `health`; `grafana` makes Grafana's JSON of it.
After a change: `python -m helm.dashboards` (a test compares the files).
"""
