"""The workload image, on a tiny model: figures of both systems, and that other logits end it."""

import json
from typing import Any

import numpy as np
import pytest

from conveyor_bench.engine import command as bench
from conveyor_bench.workloads import images

TINY = ("--workload", "image", "--model-shape", "tiny", "--dtype", "float32", "--rounds", "2")


@pytest.fixture(autouse=True)
def _a_host_that_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "processor_ticks", lambda: [0] * 8)
    monkeypatch.setattr(images, "IMAGES", 6)
    monkeypatch.setattr(images, "BATCH", 4)


def test_images_run_beside_the_model_s_own_forward(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(TINY) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["same_float32_logits_as_transformers"]
    assert all(result["images_per_second"][name] > 0 for name in ("engine", "forward"))
    assert (result["forward_fraction"] > 0, result["rounds"], result["workload"]["side"]) == (True, 2, 64)


def test_other_logits_end_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    right = images.classify
    monkeypatch.setattr(images, "classify", lambda *args: np.roll(right(*args), 1, axis=0))
    with pytest.raises(SystemExit, match="float32 logits differ from transformers'"):
        bench.main(TINY)
