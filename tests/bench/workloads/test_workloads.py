"""The workloads of docs/measuring.md but A and C, smaller, on tiny models; and how rounds are compared."""

import json
from itertools import cycle
from typing import Any

import pytest

from conveyor_bench.comparing import limit, turns
from conveyor_bench.comparing.slices import Slice
from conveyor_bench.engine import command as bench
from conveyor_bench.workloads import long_prompt, mixed, prefix, rounds
from conveyor_bench.workloads.mixed import Request, Run
from conveyor_bench.workloads.rounds import Limits, Sample

TINY = ("--model-shape", "tiny", "--dtype", "float32", "--rounds", "1")


@pytest.fixture(autouse=True)
def _a_host_that_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "processor_ticks", lambda: [0] * 8)
    monkeypatch.setattr(rounds, "processor_ticks", lambda: [0] * 8)
    monkeypatch.setattr(limit, "processor_ticks", lambda: [0] * 8)


@pytest.fixture
def measure(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(workload: str, *flags: str) -> Any:
        assert bench.main(["--workload", workload, *TINY, *flags]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


@pytest.mark.slow
@pytest.mark.usefixtures("every_slice_counts")
def test_requests_of_many_lengths_run_beside_batches_of_transformers(
    measure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("REQUESTS", 5), ("BATCH", 3), ("INPUT_TOKENS", (2, 9)), ("OUTPUT_TOKENS", (2, 7))):
        monkeypatch.setattr(mixed, name, value)
    result = measure("B", "--profile")
    assert result["peers"]["hf-static"]["ratio"]["seconds_per_token"] > 0
    assert result["output_tokens_per_second"] == pytest.approx(1 / result["figures"]["seconds_per_token"], rel=0.2)
    assert result["limit_fraction"] > 0
    assert (result["workload"]["name"], result["workload"]["requests"], result["rounds"]) == ("B", 5, 1)
    told = result["profile"]
    assert sum(told["shares"].values()) == pytest.approx(1, abs=0.01)
    assert 0 < told["limit_milliseconds"] < told["milliseconds"], "of a tiny model, whose step is mostly overhead"


@pytest.mark.slow
def test_prompts_that_begin_alike_have_their_first_tokens_in_fewer_steps(
    measure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    right = prefix.run
    monkeypatch.setattr(prefix, "run", lambda *a: (right(*a), seen.append(a[1].core.stats()))[0])
    result = measure("D")
    with_cache, without = seen[-2:]
    assert with_cache.prefix_cache_hit_tokens >= 31 * 512, "31 prompts share 512 tokens with the first"
    assert without.prefix_cache_hit_tokens == 0
    assert list(result["peers"]) == ["no-prefix-caching"]
    limit_share = result["limit"]["figures"]["all"] / result["figures"]["all"]
    assert result["limit_fraction"] == pytest.approx(limit_share, rel=0.05)


@pytest.mark.slow
def test_a_long_prompt_is_cut_beside_decodes_and_whole_in_the_peer(
    measure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest: list[int] = []
    right = long_prompt.Conveyor.steps

    def steps(self: Any) -> Any:
        longest.append(0)
        for outputs in right(self):
            longest[-1] = max(longest[-1], self.core.stats().step_num_tokens)
            yield outputs

    monkeypatch.setattr(long_prompt.Conveyor, "steps", steps)
    result = measure("E")
    assert longest[-2:] == [8 + 256 + 32, 8 + 2048 + 32]
    assert list(result["figures"]) == ["longest_gap", "long_first_token", "short_first_token", "all"]
    assert result["limit_fraction"] > 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--workload", "B", "--compare", "hf-static"], "has its own peer"),
        (["--workload", "D", "--profile"], "--profile is for the workloads A, B and C"),
        (["--workload", "embed", "--model-shape", "qwen3-8b"], "needs --model-shape bert-base or tiny"),
        (["--model-shape", "bert-base"], "needs --model-shape qwen3-0.6b"),
    ],
)
def test_what_does_not_go_together_is_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench.main(flags)
    assert message in capsys.readouterr().err


def test_rounds_end_when_the_first_figures_ratio_is_steady_and_those_that_the_host_took_are_left_out() -> None:
    def one_round(number: int) -> rounds.Round:
        ours = Sample({"wait": 1.0, "all": 2.0 + number}, stolen=0.2 if number == 1 else 0.0)
        peer = Sample({"wait": 9.0 if number == 1 else 3.0, "all": 4.0})
        return {"conveyor": ours, "limit": Sample({"all": 1.0 + number / 2}), "peer": peer}

    told = rounds.measure_rounds(one_round, Limits(100, 60), lambda _: None)
    assert (told["settled"], told["rounds"], told["dropped"]) == (True, 6, 1)
    assert (told["limit_fraction"], told["limit"]["spread"]) == (0.5, 0.0)
    assert list(told["peers"]) == ["peer"]
    assert told["peers"]["peer"]["ratio"] == {"wait": 3.0, "all": pytest.approx(4 / 5, abs=0.001)}
    said: list[str] = []
    told = rounds.measure_rounds(one_round, Limits(100, -1), said.append)
    assert (told["settled"], told["rounds"], said[-1]) == (False, 1, "event=budget_spent rounds=1 of=100")


def test_who_begins_says_how_far_and_who_is_there_already_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(turns.time, "perf_counter", lambda: now)

    def start(step: int, seconds: float) -> Any:
        def run(requests: Any) -> Run:
            nonlocal now
            for tokens in [*range(step, 12, step), 12]:
                now += seconds
                yield tokens

        return run

    systems = {"conveyor": start(5, 1.0), "peer": start(1, 0.5)}
    orders = cycle([["conveyor", "peer"], ["peer", "conveyor"]])
    told = mixed.one_round(systems, lambda tokens: Slice(tokens, tokens / 8, 0), [Request([1], 12)], orders)
    assert {name: sample.figures["seconds_per_token"] for name, sample in told.items()} == {
        "conveyor": 3 / 12,
        "limit": 1 / 8,
        "peer": 0.5,
    }
