"""Descriptions of dashboards -> the JSON that Grafana reads. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from helm.dashboards.describe import Dashboard, Panel, Query, Row, Variable

SCHEMA_VERSION = 42  # Grafana 12; older ones take it, newer ones migrate it when they load it
COLUMNS = 24
PROMETHEUS = {"type": "prometheus", "uid": "${datasource}"}

Json = dict[str, Any]


def dashboard(d: Dashboard, titles: dict[str, str]) -> Json:
    """titles: of all dashboards, by uid."""
    return {
        "uid": d.uid,
        "title": d.title,
        "description": d.about,
        "tags": ["lanterne"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": d.since, "to": "now"},
        "timepicker": {},
        "timezone": "browser",
        "weekStart": "",
        "fiscalYearStartMonth": 0,
        "preload": False,
        "annotations": {"list": [_alerts()]},
        "links": [_to_dashboard(uid, titles[uid]) for uid in d.links],
        "templating": {"list": [_datasource(), *map(_variable, d.variables), _collector()]},
        "panels": _panels(d.rows),
    }


def _alerts() -> Json:
    """What fires is drawn into every graph."""
    return {
        "name": "Alerts",
        "datasource": PROMETHEUS,
        "enable": True,
        "hide": False,
        "iconColor": "orange",
        "expr": 'ALERTS{alertname=~"Lanterne.+", alertstate="firing", severity!="info"}',
        "titleFormat": "{{alertname}}",
        "textFormat": "{{workload}} {{comm}} {{rank}} {{node}}",
        "step": "30s",
    }


def _to_dashboard(uid: str, title: str) -> Json:
    return {
        "type": "link",
        "title": title,
        "url": f"/d/{uid}",
        "icon": "dashboard",
        "tooltip": "",
        "tags": [],
        "asDropdown": False,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
    }


def _datasource() -> Json:
    return {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "regex": "",
        "refresh": 1,
        "hide": 0,
        "includeAll": False,
        "multi": False,
        "options": [],
        "current": {},
    }


def _collector() -> Json:
    """Where links to the JSON view go, as seen from the browser."""
    url = "http://localhost:9478"
    return {
        "name": "collector",
        "label": "Collector",
        "description": "address of lanterne-collector, for links to its JSON view",
        "type": "textbox",
        "query": url,
        "hide": 0,
        "options": [{"selected": True, "text": url, "value": url}],
        "current": {"text": url, "value": url},
    }


def _variable(v: Variable) -> Json:
    query = f"label_values({v.of}, {v.label or v.name})"
    everything: Json = {"includeAll": True, "multi": True, "allValue": ".*"}
    return {
        "name": v.name,
        "label": v.name.capitalize(),
        "type": "query",
        "datasource": PROMETHEUS,
        "definition": query,
        "query": {"query": query, "refId": v.name, "qryType": 1},
        "regex": "",
        "refresh": 2,  # whenever the time range changes
        "sort": 3,  # numbers by their value
        "hide": 0,
        "options": [],
        "current": {"text": ["All"], "value": ["$__all"]} if v.several else {},
        **(everything if v.several else {"includeAll": False, "multi": False}),
    }


def _panels(rows: Sequence[Row]) -> list[Json]:
    """Rows one below the other, panels from left to right, broken where a line is full."""
    found: list[Json] = []
    top = 0
    for row in rows:
        found.append(_row(row, len(found) + 1, top))
        left, top, tallest = 0, top + 1, 0
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                left, top, tallest = 0, top + tallest, 0
            place = {"x": left, "y": top, "w": panel.width, "h": panel.height}
            found.append(_panel(panel, len(found) + 1, place))
            left, tallest = left + panel.width, max(tallest, panel.height)
        top += tallest
    return found


def _row(row: Row, number: int, top: int) -> Json:
    return {
        "id": number,
        "type": "row",
        "title": row.title,
        "collapsed": False,
        "gridPos": {"x": 0, "y": top, "w": COLUMNS, "h": 1},
        "panels": [],
    }


def _panel(panel: Panel, number: int, place: Json) -> Json:
    found: Json = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": PROMETHEUS,
        "gridPos": place,
        "targets": [_target(q, chr(ord("A") + i)) for i, q in enumerate(panel.queries)],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": _overrides(panel)},
        "options": _options(panel),
    }
    if panel.kind == "table":
        found["transformations"] = _table(panel)
    if panel.points:
        found["maxDataPoints"] = panel.points
    return found


def _target(query: Query, ref: str) -> Json:
    return {
        "refId": ref,
        "datasource": PROMETHEUS,
        "editorMode": "code",
        "expr": query.expr,
        "legendFormat": query.legend or "__auto",
        "format": "heatmap" if query.buckets else "table" if query.instant else "time_series",
        "instant": query.instant,
        "range": not query.instant,
        "exemplar": query.exemplars,
    }


def _defaults(panel: Panel) -> Json:
    found: Json = {
        "unit": panel.unit,
        "color": {"mode": "palette-classic"},
        "thresholds": _thresholds(panel),
        "mappings": _mappings(panel),
        "links": [{"title": k.title, "url": k.url, "targetBlank": k.new_tab} for k in panel.links],
        "custom": _custom(panel),
    }
    if panel.low is not None:
        found["min"] = panel.low
    if panel.high is not None:
        found["max"] = panel.high
    if panel.kind == "status-history":
        found["color"] = {"mode": "continuous-YlRd"}
    elif panel.kind in ("stat", "table", "state-timeline") and (panel.names or _marked(panel)):
        found["color"] = {"mode": "thresholds"}
    return found


def _marked(panel: Panel) -> bool:
    return panel.warn is not None or panel.bad is not None


def _thresholds(panel: Panel) -> Json:
    warn, bad = panel.warn, panel.bad
    steps: list[tuple[str, float | None]] = [("green", None)]
    if panel.falling:
        steps = [("red", None), ("yellow", bad), ("green", warn)]
        if bad is None:
            steps = [("yellow", None), ("green", warn)]
    else:
        steps += [("yellow", warn)] if warn is not None else []
        steps += [("red", bad)] if bad is not None else []
    return {"mode": "absolute", "steps": [{"color": c, "value": v} for c, v in steps]}


def _mappings(panel: Panel) -> list[Json]:
    if not panel.names:
        return []
    options = {
        value: {"text": text, "color": colour, "index": i}
        for i, (value, text, colour) in enumerate(panel.names)
    }
    return [{"type": "value", "options": options}]


def _custom(panel: Panel) -> Json:
    match panel.kind:
        case "timeseries":
            return {
                "drawStyle": "line",
                "lineWidth": 1,
                "fillOpacity": 30 if panel.stacked else 5,
                "showPoints": "never",
                "spanNulls": False,  # what is unknown is a gap
                "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
                "thresholdsStyle": {"mode": "line" if _marked(panel) else "off"},
            }
        case "status-history" | "state-timeline":
            return {"fillOpacity": 90, "lineWidth": 0}
        case "table":
            return {"align": "auto", "cellOptions": {"type": "auto"}, "filterable": True}
        case _:
            return {}


def _overrides(panel: Panel) -> list[Json]:
    return [
        {
            "matcher": {"id": "byName", "options": title},
            "properties": [{"id": "unit", "value": unit}],
        }
        for title, unit in panel.units
    ]


def _options(panel: Panel) -> Json:
    legend = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}
    match panel.kind:
        case "timeseries":
            return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
        case "stat":
            return {
                "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
                "colorMode": "background" if _marked(panel) else "value",
                "graphMode": "none",
                "justifyMode": "center",
                "textMode": "auto",
                "orientation": "auto",
            }
        case "table":
            return {"showHeader": True, "cellHeight": "sm", "footer": {"show": False}}
        case "heatmap":
            return {
                "calculate": False,
                "yAxis": {"unit": panel.unit, "axisPlacement": "left"},
                "color": {
                    "mode": "scheme",
                    "scheme": "Oranges",
                    "fill": "dark-orange",
                    "scale": "exponential",
                    "exponent": 0.5,
                    "steps": 64,
                },
                "cellGap": 1,
                "rowsFrame": {"layout": "auto"},
                "legend": {"show": True},
                "tooltip": {"mode": "single", "yHistogram": False},
                "exemplars": {"color": "rgba(255,0,255,0.7)"},
                "filterValues": {"le": 1e-9},
            }
        case "status-history":
            return {"legend": legend, "rowHeight": 0.9, "showValue": "never"}
        case "state-timeline":
            return {"legend": legend, "rowHeight": 0.9, "showValue": "auto", "mergeValues": True}
    raise ValueError(f"{panel.title}: unknown kind {panel.kind!r}")


def _table(panel: Panel) -> list[Json]:
    """One line for each label set; the columns of several queries side by side."""
    hidden = {"Time": True, "__name__": True, "job": True, "instance": True}
    hidden |= dict.fromkeys(panel.hidden, True)
    return [
        {"id": "merge", "options": {}},
        {
            "id": "organize",
            "options": {
                "excludeByName": hidden,
                "indexByName": {},
                "renameByName": dict(panel.titles),
            },
        },
    ]
