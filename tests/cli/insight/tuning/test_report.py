"""Tests what is printed about a sweep."""

import argparse
import json
from pathlib import Path
from xml.etree import ElementTree

import yaml
from tests.cli.insight.tuning.service import Arithmetic, make_figures

from conveyor_api.batching import Batching
from conveyor_insight.tuning.candidates import Candidate, make_plan
from conveyor_insight.tuning.flags import report
from conveyor_insight.tuning.report import build_curve, build_recommendation, draw_curve
from conveyor_insight.tuning.sweep import Result, Sweep, Trial
from conveyor_load.objectives import Objectives

LIMIT = Objectives(latency_seconds=1)
PLAN = make_plan(Batching(max_batch_size=8), "Generate", [4, 16, 1024], [], [])


async def measure() -> list[Result]:
    results: list[Result] = []
    service = Arithmetic({Candidate(8): 4, Candidate(4): 2, Candidate(16): 9})
    await Sweep(LIMIT, service.measure, (1, 2, 4, 8, 16)).go(service, PLAN, results)
    return results


def flags(svg: Path | None = None, output: str = "text") -> argparse.Namespace:
    return argparse.Namespace(objective=LIMIT, svg=svg, output=output)


async def test_the_text_has_a_table_a_curve_and_a_patch_with_its_reason(tmp_path: Path) -> None:
    text = report(await measure(), PLAN, flags(tmp_path / "curve.svg"))
    table, curve, reason, patch = text.split("\n\n")
    assert table.splitlines()[1].startswith("a   maxBatchSize 8      1            1         10         50/50/50")
    assert "latency P95 5000 ms" in table
    assert "does not run: KVBudgetTooSmall: raise it" in table
    assert "output tokens/s" in curve
    assert reason == (
        "maxBatchSize 16 meets latency 1000 ms at P95 up to 8 requests/s; the current maxBatchSize 8 only up to 4."
    )
    assert yaml.safe_load(patch) == {"spec": {"batching": {"maxBatchSize": 16}}}
    drawing = ElementTree.parse(tmp_path / "curve.svg").getroot()
    lines = [child for child in drawing if child.tag.endswith("polyline")]
    assert len(lines) == 4, "three settings that run, and the objective"


async def test_json_has_every_trial() -> None:
    document = json.loads(report(await measure(), PLAN, flags(output="json")))
    assert (document["current"], document["recommended"]) == ({"maxBatchSize": 8}, {"maxBatchSize": 16})
    assert [len(each["trials"]) for each in document["candidates"]] == [4, 3, 5, 0]
    assert document["candidates"][0]["trials"][3]["misses"] == ["latency P95 5000 ms"]
    assert document["candidates"][0]["trials"][0]["latency"] == {"p50": 0.1, "p95": 0.1, "p99": 0.1}


def test_a_setting_that_is_right_is_kept_and_none_that_is_wrong_is_recommended() -> None:
    held, missed = (Trial(1, make_figures(1, each), misses) for each, misses in ((0.1, ()), (5.0, ("too slow",))))
    kept = build_recommendation([Result(Candidate(8), [held])], PLAN, LIMIT)
    assert kept.endswith("requests/s. No other setting serves 5 % more, so keep it.")
    none = build_recommendation([Result(Candidate(8), [missed])], PLAN, LIMIT)
    assert none.startswith("No setting meets latency 1000 ms at P95. At 1 requests/s: too slow. ")
    assert "spec:" not in none
    broken = build_recommendation([Result(Candidate(8), [], "it ended")], PLAN, LIMIT)
    assert broken == "No setting runs, so there is nothing to recommend."


def test_the_curve_in_characters_marks_settings_and_the_objective() -> None:
    trials = [Trial(rate, make_figures(rate, latency), ()) for rate, latency in ((1, 0.2), (2, 0.5), (4, 30.0))]
    drawn = build_curve([Result(Candidate(8), trials)], LIMIT).splitlines()
    assert drawn[0] == "latency at P95, ms"
    assert drawn[1].startswith("    3000 |"), "a trial far beyond the objective does not press the others down"
    assert drawn[1].endswith("a")
    assert sum(line.count("a") for line in drawn[1:-2]) == 3
    assert sum(set(line.partition("|")[2]) >= {"-"} for line in drawn) == 1
    assert build_curve([Result(Candidate(8))], LIMIT) == ""


def test_a_picture_that_cannot_be_written_loses_no_result(tmp_path: Path) -> None:
    results = [Result(Candidate(8), [Trial(1, make_figures(1, 0.1), ())])]
    text = report(results, PLAN, flags(tmp_path / "nowhere" / "curve.svg"))
    assert text.splitlines()[-1].startswith("no SVG: ")
    assert "so keep it" in text
    assert "no SVG: there is nothing to draw" in report([Result(Candidate(8), [], "x")], PLAN, flags(tmp_path / "a"))
    assert draw_curve(results, LIMIT).startswith("<svg")
