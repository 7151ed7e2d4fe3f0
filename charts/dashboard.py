"""Prints the chart's Grafana dashboard, of the rows in dashboard_panels.py: `python charts/dashboard.py`.

Called by `make generate`, and by `make check-generated`, which compares.
"""

import json
from collections.abc import Iterator
from typing import Any

from dashboard_panels import ROWS, Panel

Json = dict[str, Any]

SCHEMA_VERSION = 42  # Grafana's LATEST_VERSION in apps/dashboard/pkg/migration/schemaversion
COLUMNS, HEIGHT = 24, 8
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def build() -> Json:
    """The dashboard, as Grafana exports one."""
    queued = "conveyor_gateway_queued_requests"
    return {
        "uid": "conveyor",
        "title": "Conveyor",
        "description": "Queues, engines and the programs of Conveyor. Written by `make generate`; do not edit.",
        "tags": ["conveyor"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,  # one cursor in all panels
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [
                {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
                _variable("namespace", "Namespace", f"label_values({queued}, namespace)"),
                _variable("service", "Service", f'label_values({queued}{{namespace="$namespace"}}, inference_service)'),
            ]
        },
        "panels": [{"id": number, **panel} for number, panel in enumerate(_place(), 1)],
    }


def _variable(name: str, label: str, query: str) -> Json:
    """One with the values of a label, in their order, read anew when the time range changes."""
    variable = {"name": name, "label": label, "type": "query", "datasource": SOURCE, "query": query}
    return variable | {"refresh": 2, "sort": 1}


def _place() -> Iterator[Json]:
    """The panels from left to right, under the heading of their row."""
    y = 0
    for title, panels in ROWS.items():
        yield {
            "type": "row",
            "title": title,
            "collapsed": False,
            "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
            "panels": [],
        }
        x, y = 0, y + 1
        for panel in panels:
            if x + panel.width > COLUMNS:
                x, y = 0, y + HEIGHT
            yield _draw(panel) | {"gridPos": {"x": x, "y": y, "w": panel.width, "h": HEIGHT}}
            x += panel.width
        y += HEIGHT


def _draw(panel: Panel) -> Json:
    right = {
        "matcher": {"id": "byName", "options": panel.right},
        "properties": [{"id": "custom.axisPlacement", "value": "right"}],
    }
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": [right] if panel.right else []},
        "options": {"tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
            for number, (legend, expr) in enumerate(panel.queries.items())
        ],
    }


if __name__ == "__main__":
    print(json.dumps(build(), indent=1))
