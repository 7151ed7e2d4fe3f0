"""The modes in virtual time: a small run of what `make modes` writes, and what its cost model promises."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from conveyor_bench.modes import command
from conveyor_bench.modes.cost import DEVICES, SHAPES, Roofline
from conveyor_bench.modes.requests import CAPS, throughput_requests
from conveyor_bench.modes.systems import MODES, Memory
from conveyor_bench.modes.virtual import run_mode
from e2e.cluster.paths import REPOSITORY

COST = Roofline(DEVICES["A100-40G"], SHAPES["OPT-13B"])
MEMORY = Memory(COST.kv_tokens, 256)


@pytest.mark.slow
def test_a_run_writes_figures_of_every_mode_a_page_and_its_pictures(tmp_path: Path) -> None:
    command_line = re.search(r"conveyor_bench modes (.*)", (REPOSITORY / "docs/batching.md").read_text())
    assert command_line
    small = ["--requests", "4", "--processes", "1", "--out", str(tmp_path), "--pictures", str(tmp_path)]
    command.main([*command_line[1].split(), *small])  # so few requests may miss a bar
    result = json.loads((tmp_path / "virtual.json").read_text())
    assert set(result["modes"]) == set(MODES)
    for caps in result["modes"].values():
        assert [int(cap) for cap in caps] == list(CAPS)
        for figures in caps.values():
            assert figures["output_tokens_per_second"] > 0
            assert figures["ttft_p50"] <= figures["ttft_p99"]
            assert all(0 <= figures[key] <= 1 for key in ("padding_waste", "kv_waste", "utilisation"))
    for cap, parts in result["decomposition"].items():
        assert parts["policy"] * parts["memory"] == pytest.approx(result["ratios"][cap])
    page = (tmp_path / "index.html").read_text()
    assert page.count("<svg") == 8
    assert "<script" not in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    pictures = list(tmp_path.glob("*.svg"))
    assert len(pictures) == 8
    for picture in pictures:
        ElementTree.parse(picture)


def test_only_static_pads_and_continuous_wastes_little_room_and_wins_where_lengths_vary() -> None:
    requests = throughput_requests(60, 1536, 100)
    result = {name: run_mode(mode, COST, MEMORY, requests, 512 + 1536, 8192) for name, mode in MODES.items()}
    assert [name for name in result if result[name]["padding_waste"]] == ["static"]
    assert result["continuous"]["kv_waste"] < 0.04 < result["static"]["kv_waste"]
    assert result["none"]["batch_limit"] == 1
    assert result["static"]["batch_limit"] == COST.kv_tokens // 2048 == 7
    speeds = [result[name]["output_tokens_per_second"] for name in ("none", "static", "continuous")]
    assert speeds == sorted(speeds)
    assert speeds[2] > 2 * speeds[1]
