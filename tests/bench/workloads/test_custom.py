"""The workload custom of docs/measuring.md, with few requests for a tiny program."""

import json

import pytest

from conveyor_bench.engine import command as bench
from conveyor_bench.engine import custom

TINY = ["--workload", "custom", "--model-shape", "tiny", "--rounds", "2"]


@pytest.mark.slow
def test_a_request_is_measured_beside_a_direct_call(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(TINY) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "event=outputs_equal dtype=float32: same as the program's own" in lines
    told = json.loads(lines[-1])
    assert told["requests"] == custom._SLICE
    seconds = told["seconds"]
    assert all(0 < seconds[name]["p50"] <= seconds[name]["p95"] for name in ("engine", "direct"))
    added = (seconds["engine"]["p50"] - seconds["direct"]["p50"]) * 1000
    assert told["added_p50_milliseconds"] == pytest.approx(added, abs=1e-3)


@pytest.mark.slow
def test_other_numbers_are_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    load = custom.load

    class Wrong:
        def __init__(self, path: object) -> None:
            self._module = load(path).module()

        def module(self) -> object:
            return lambda tensor: self._module(tensor) + 1

    monkeypatch.setattr(custom, "load", Wrong)
    with pytest.raises(SystemExit, match="differ from those of the program"):
        bench.main(TINY)
