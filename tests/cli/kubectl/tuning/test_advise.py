"""Tests `kubectl conveyor advise` of docs/tuning.md, with a service at a real API server and a real engine's page."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.contract.serving import LONG
from tests.engine.processes import IDLE, EngineServer
from tests.operator.stage import Space

from conveyor_kubectl.command import main
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.tools import binary

Json = dict[str, Any]


@pytest.fixture
def engine(model: Path, tmp_path: Path) -> Any:
    with EngineServer(tmp_path / "engine", model, IDLE, max_num_seqs=2) as engine:
        yield engine.wait_ready()


@pytest.mark.slow
def test_advice_is_made_of_what_the_engine_has_seen(
    space: Space, control_plane: ControlPlane, engine: EngineServer
) -> None:
    space.make_service(task="Generate", batching={"mode": "Static", "maxBatchSize": 2})
    for _ in range(100):
        engine.post("/v1/completions", {**LONG, "max_tokens": 8}).raise_for_status()
    flags = ["-n", space.namespace, f"--kubeconfig={control_plane.kubeconfig}", f"--metrics={engine.url}/metrics"]
    command = [str(binary("kubectl")), "conveyor", "advise", "qwen", *flags]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    head, _, patch, tune = output.rstrip().split("\n\n")
    assert head.endswith("task Generate, mode Static, maxBatchSize 2; 1 engines have seen 100 requests")
    suggested = yaml.safe_load(patch)["spec"]
    assert suggested["batching"] == {"mode": "Continuous"}
    assert suggested["workload"].keys() == {"inputTokens", "outputTokens"}
    space.edit("qwen", **suggested)
    assert tune.splitlines()[1].startswith(
        f"kubectl conveyor tune qwen -n {space.namespace} --replica --input-tokens 1,"
    )
    found = json.loads(subprocess.run([*command, "-o", "json"], capture_output=True, text=True, check=True).stdout)
    assert found["patch"] is None, "the patch is taken, and fits"
    assert found["traffic"]["output_tokens"]["mean"] == 8
    assert found["traffic"]["kvTokens"] > 0


def test_what_cannot_be_read_is_one_sentence(
    space: Space, control_plane: ControlPlane, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space.make_service(task="Generate")
    flags = ["advise", "qwen", "-n", space.namespace, f"--kubeconfig={control_plane.kubeconfig}"]
    page = tmp_path / "page"
    page.write_text("<html>{")
    long = tmp_path / "long"
    long.write_bytes(b"#" * ((8 << 20) + 1))
    for metrics, words in (
        ("http://127.0.0.1:9/metrics", "http://127.0.0.1:9/metrics: Cannot connect"),
        (tmp_path / "nowhere", "no metrics: "),
        (page, "an engine's metrics cannot be read: "),
        (long, f"no metrics: {long} is longer than 8 MiB"),
    ):
        assert main([*flags, f"--metrics={metrics}"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"kubectl conveyor: {words}")
    assert main(flags) == 0, "without engines the task alone decides"
    assert "0 engines have seen 0 requests" in capsys.readouterr().out
