"""The modes in virtual time: a small run of what `make modes` writes, and what its cost model promises."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from conveyor_bench.modes import command
from conveyor_bench.modes.cost import DEVICES, SHAPES, Fitted, Roofline, StepCounts
from conveyor_bench.modes.requests import CAPS, latency_requests, output_tokens, throughput_requests
from conveyor_bench.modes.systems import MODES, Memory
from conveyor_bench.modes.virtual import run_mode
from conveyor_engine.wire.step import StepPlan
from e2e.cluster.paths import REPOSITORY

COST = Roofline(DEVICES["A100-40G"], SHAPES["OPT-13B"])
MEMORY = Memory(COST.kv_tokens, 256)


def plan(rows: list[tuple[int, int]], num_logits: int) -> StepPlan:
    """A step of rows (tokens computed before, tokens now); the last ones sample."""
    logits = [0] * (len(rows) - num_logits) + [1] * num_logits
    return StepPlan(0, [], [], list(range(len(rows))), [c for c, _ in rows], [n for _, n in rows], logits, 0)


@pytest.mark.slow
def test_a_run_writes_figures_of_every_mode_a_page_and_its_pictures(tmp_path: Path) -> None:
    command_line = re.search(r"conveyor_bench modes (.*)", (REPOSITORY / "docs/batching.md").read_text())
    assert command_line
    small = ["--requests", "4", "--processes", "1", "--out", str(tmp_path), "--pictures", str(tmp_path)]
    command.main([*command_line[1].split(), *small])  # so few requests may miss a bar
    told = json.loads((tmp_path / "virtual.json").read_text())
    assert set(told["modes"]) == set(MODES)
    for caps in told["modes"].values():
        assert [int(cap) for cap in caps] == list(CAPS)
        for figures in caps.values():
            assert figures["output_tokens_per_second"] > 0
            assert figures["ttft_p50"] <= figures["ttft_p99"]
            assert all(0 <= figures[key] <= 1 for key in ("padding_waste", "kv_waste", "utilisation"))
    for cap, parts in told["decomposition"].items():
        assert parts["policy"] * parts["memory"] == pytest.approx(told["ratios"][cap])
    page = (tmp_path / "index.html").read_text()
    assert page.count("<svg") == 8
    assert "<script" not in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    pictures = list(tmp_path.glob("*.svg"))
    assert len(pictures) == 8
    for picture in pictures:
        ElementTree.parse(picture)


def test_requests_keep_their_lengths_whatever_their_number() -> None:
    for cap in CAPS:
        requests = throughput_requests(300, cap, 100)
        assert {len(request.prompt_token_ids) for request in requests} == {512}
        assert max(map(output_tokens, requests)) <= cap
    assert sum(map(output_tokens, requests)) / 300 == pytest.approx(128, rel=0.15)
    arrivals = [request.arrival_time for request in latency_requests(300, 4.0, 100)]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(75, rel=0.2)


def test_only_static_pads_and_continuous_wastes_little_room_and_wins_where_lengths_vary() -> None:
    requests = throughput_requests(60, 1536, 100)
    told = {name: run_mode(mode, COST, MEMORY, requests, 512 + 1536, 8192) for name, mode in MODES.items()}
    assert [name for name in told if told[name]["padding_waste"]] == ["static"]
    assert told["continuous"]["kv_waste"] < 0.04 < told["static"]["kv_waste"]
    assert told["none"]["batch_limit"] == 1
    assert told["static"]["batch_limit"] == COST.kv_tokens // 2048 == 7
    speeds = [told[name]["output_tokens_per_second"] for name in ("none", "static", "continuous")]
    assert speeds == sorted(speeds)
    assert speeds[2] > 2 * speeds[1]


def test_a_step_costs_its_reading_or_its_arithmetic_whichever_is_longer() -> None:
    one, eight = (COST.seconds(StepCounts.of(plan([(600, 1)] * rows, rows))) for rows in (1, 8))
    reading = SHAPES["OPT-13B"].weight_bytes / (1555e9 * 0.8)
    assert one == pytest.approx(reading + 0.0005, rel=0.05)
    assert eight < 1.3 * one, "all rows share the reading of the weights"
    prompts = [COST.seconds(StepCounts.of(plan([(0, 512)] * rows, rows))) for rows in (4, 8)]
    assert prompts[1] == pytest.approx(2 * prompts[0], rel=0.05), "prompts are arithmetic"


def test_counts_of_a_step_are_those_of_its_rows() -> None:
    counts = StepCounts.of(plan([(10, 1), (0, 4), (4, 2)], 2))
    assert counts == StepCounts(tokens=7, logits=2, context=11 + 4 + 6, pairs=11 + (1 + 2 + 3 + 4) + (5 + 6))


def test_constants_fitted_to_steps_of_a_machine_give_its_seconds() -> None:
    shapes = [[(context, 1)] * rows for context in (100, 600, 900) for rows in (1, 3, 8, 20)]
    shapes += [[(0, prompt)] for prompt in (64, 256, 512, 900)] + [[(512, 1)] * 4 + [(256, 256)]]
    steps = [StepCounts.of(plan(rows, len(rows))) for rows in shapes]

    def machine(counts: StepCounts) -> float:
        return 0.003 + 2e-5 * counts.tokens + 1e-7 * counts.context + 1e-9 * counts.pairs

    fitted = Fitted([(counts, machine(counts)) for counts in steps])
    assert all(constant >= 0 for constant in fitted.constants)
    for counts in steps:
        assert fitted.seconds(counts) == pytest.approx(machine(counts), rel=0.02)


@pytest.mark.parametrize("flag", ["--requests", "--measured-requests", "--processes"])
def test_numbers_below_one_are_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main([flag, "0"])
    assert f"{flag} must be at least 1" in capsys.readouterr().err
