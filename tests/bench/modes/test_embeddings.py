"""Tests embeddings in virtual time: a smaller version of the picture in docs/batching.md."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from conveyor_bench.modes import embeddings
from conveyor_bench.modes.embeddings import SETTINGS, run
from e2e.cluster.paths import REPOSITORY


def test_a_run_writes_each_setting_s_figures_and_the_picture(tmp_path: Path) -> None:
    command_line = re.search(r"conveyor_bench embed-modes (.*)", (REPOSITORY / "docs/batching.md").read_text())
    assert command_line
    small = ["--requests", "40", "--out", str(tmp_path), "--pictures", str(tmp_path)]
    assert embeddings.main([*command_line[1].split(), *small]) == 0
    told = json.loads((tmp_path / "embeddings.json").read_text())
    assert list(told["settings"]) == [setting.name for setting in SETTINGS]
    for each in told["settings"].values():
        assert each["capacity"] > 0
        for load in each["loads"].values():
            assert 0 < load["p50"] <= load["p95"] <= load["p99"]
    root = ElementTree.parse(tmp_path / "virtual-embeddings.svg").getroot()
    assert len(root.findall(".//{*}polyline")) == len(SETTINGS)


def test_a_window_costs_a_lone_request_its_length_and_a_batch_gives_throughput() -> None:
    settings = {setting.name: setting for setting in SETTINGS}
    lone = {name: run(setting, 40, 0.2)["p50"] for name, setting in settings.items()}
    assert lone["Dynamic 32, 10 ms"] == pytest.approx(lone["Continuous 32"] + 10, abs=0.5)
    assert lone["Static 32, 1 s"] > 900
    busy = {name: run(setting, 400, None)["requests_per_second"] for name, setting in settings.items()}
    assert busy["Dynamic 32, 10 ms"] > 2 * busy["None"]
    assert busy["Dynamic 8, 10 ms"] < busy["Dynamic 32, 10 ms"]


def test_numbers_below_one_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        embeddings.main(["--requests", "0"])
    assert "--requests must be at least 1" in capsys.readouterr().err
