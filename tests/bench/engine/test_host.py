"""Tests the small command `host` of docs/measuring.md: its last line, and that all but the forward is real."""

import json

import pytest

from conveyor_bench.engine import host
from conveyor_bench.engine.idle import TOKEN, IdleExecutor
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.wire.request import EngineRequest, SamplingParams


@pytest.mark.slow
def test_the_last_line_is_one_json_object_with_the_parts_and_their_sum(capsys: pytest.CaptureFixture[str]) -> None:
    assert host.main(["--rows", "3", "--steps", "4", "--streamed-tokens", "20"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(result["parts"]) == ["schedule", "build", "update", "send"]
    assert result["host_milliseconds_per_step"] == pytest.approx(sum(result["parts"].values()), abs=0.003)
    assert min(result["parts"].values()) > 0
    assert result["streamed_tokens_per_second"] > 0


def test_the_executor_without_a_model_runs_requests_to_their_end() -> None:
    core = EngineCore(config := host.build_config("none", 2, 1), IdleExecutor(config))
    params = SamplingParams(max_tokens=3, temperature=0.0)
    core.add_request(EngineRequest(request_id="a", prompt_token_ids=[1, 2], params=params))
    outputs = [output for _ in range(3) for output in core.step(0.0)]
    assert [output.new_token_ids for output in outputs] == [[TOKEN]] * 3
    assert not core.has_unfinished()


@pytest.mark.parametrize("flag", ["--rows", "--steps", "--streamed-tokens"])
def test_sizes_below_one_are_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        host.main([flag, "0"])
    assert f"{flag} must be at least 1" in capsys.readouterr().err
