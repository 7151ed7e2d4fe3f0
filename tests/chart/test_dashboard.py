"""Tests the chart's Grafana dashboard as a file: rendering, places, variables, legends. Queries: tests/alerts."""

import json
import re
from itertools import combinations

import pytest
from tests.chart.installation import CHART, Json, find, render_json

DASHBOARD: Json = json.loads((CHART / "dashboards" / "conveyor.json").read_text())
PANELS: list[Json] = DASHBOARD["panels"]
CHARTS = [panel for panel in PANELS if panel["type"] != "row"]
COLUMNS = 24  # of Grafana's grid
BUILT_IN = {"__rate_interval"}


def test_the_dashboard_is_a_config_map_that_grafana_s_sidecar_selects() -> None:
    assert "conveyor-dashboards" not in {item["metadata"]["name"] for item in render_json()}
    settings = {"create": True, "labels": {"team": "a"}, "annotations": {"grafana_folder": "Conveyor"}}
    made = find(render_json(dashboards=settings), "ConfigMap", "conveyor-dashboards")
    assert {"grafana_dashboard": "1", "team": "a"}.items() <= made["metadata"]["labels"].items()
    assert made["metadata"]["annotations"] == {"grafana_folder": "Conveyor"}
    assert {name: json.loads(text) for name, text in made["data"].items()} == {"conveyor.json": DASHBOARD}


@pytest.mark.parametrize("member", ["id", "title"])
def test_no_two_panels_have_one_id_or_title(member: str) -> None:
    found = [panel[member] for panel in PANELS]
    assert len(found) == len(set(found)) > 30


def test_panels_are_on_the_grid_and_do_not_overlap() -> None:
    for first, second in combinations((panel["gridPos"] for panel in PANELS), 2):
        beside = first["x"] + first["w"] <= second["x"] or second["x"] + second["w"] <= first["x"]
        above = first["y"] + first["h"] <= second["y"] or second["y"] + second["h"] <= first["y"]
        assert beside or above, (first, second)
    assert all(0 <= at["x"] < at["x"] + at["w"] <= COLUMNS for at in (panel["gridPos"] for panel in PANELS))


def test_a_row_has_no_gap() -> None:
    area = sum(panel["gridPos"]["w"] * panel["gridPos"]["h"] for panel in PANELS)
    assert area == COLUMNS * max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in PANELS)


def test_the_data_source_is_a_variable_and_every_variable_is_defined() -> None:
    variables = [each["name"] for each in DASHBOARD["templating"]["list"]]
    assert variables == ["datasource", "namespace", "service"]
    queries = [
        *CHARTS,
        *(target for panel in CHARTS for target in panel["targets"]),
        *DASHBOARD["templating"]["list"][1:],
    ]
    assert {each["datasource"]["uid"] for each in queries} == {"${datasource}"}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD))) == {*variables, *BUILT_IN}


@pytest.mark.parametrize("panel", CHARTS, ids=lambda panel: panel["title"])
def test_a_panel_says_in_a_sentence_what_to_look_for_and_shows_each_series_by_name(panel: Json) -> None:
    assert re.fullmatch(r"\S.*[^.]\.", panel["description"])
    assert ". " not in panel["description"]
    assert panel["fieldConfig"]["defaults"]["unit"]
    references = [target["refId"] for target in panel["targets"]]
    assert len(references) == len(set(references))
    for target in panel["targets"]:
        groups = re.findall(r"\b(?:sum|max|min) by \(([^)]*)\)", target["expr"])
        for group in groups or [""]:
            labels = {label for label in group.split(", ") if label} - {"le"}
            assert labels == set(re.findall(r"{{(\w+)}}", target["legendFormat"])), target
