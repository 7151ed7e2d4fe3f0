"""Tests transformers' continuous batching as a system: what it yields while it runs, and that its errors are raised."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conveyor_bench.comparing.systems import write_model
from conveyor_bench.comparing.turns import random_prompts
from conveyor_bench.peers import hf_continuous
from conveyor_bench.peers.hf_continuous import HfContinuous


def test_prompts_beyond_one_step_take_two_and_each_decode_gives_everybody_a_token(tmp_path: Path) -> None:
    write_model(tmp_path, "tiny", torch.float32)
    run = HfContinuous(tmp_path, "float32").start(random_prompts(12, (100,), 1000, seed=1), 4)
    assert [next(run) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(StopIteration) as stop:
        next(run)
    assert [len(row) for row in stop.value.value] == [4] * 12


def manager(**parts: Any) -> Any:
    return SimpleNamespace(**{"pause": nullcontext, "add_requests": lambda *_, **__: ["a"], **parts})


def test_a_manager_that_ends_or_a_request_that_fails_is_an_error() -> None:
    ended = manager(get_result=lambda timeout: None, is_running=lambda: False)
    with pytest.raises(RuntimeError, match="ended before"):
        hf_continuous._generate(ended, [[1]], 1)
    failed = manager(get_result=lambda timeout: SimpleNamespace(error="too long"))
    with pytest.raises(RuntimeError, match="failed: too long"):
        hf_continuous._generate(failed, [[1]], 1)


def test_a_step_longer_than_a_second_is_waited_for() -> None:
    done = SimpleNamespace(error=None, is_finished=lambda: True, request_id="a", generated_tokens=[5])
    results = iter([None, done])
    slow = manager(get_result=lambda timeout: next(results), is_running=lambda: True)
    assert hf_continuous._generate(slow, [[1]], 1) == [[5]]


def test_nobody_has_a_token_while_somebody_waits() -> None:
    def told(waiting: dict[str, Any], *lengths: int) -> int:
        active = {str(n): SimpleNamespace(generated_tokens=[0] * n) for n in lengths}
        scheduler = SimpleNamespace(waiting_requests=waiting, active_requests=active)
        return hf_continuous._fewest(SimpleNamespace(batch_processor=SimpleNamespace(scheduler=scheduler)), 9)

    assert (told({"a": 1}, 3, 2), told({}, 3, 2), told({})) == (0, 2, 9)
