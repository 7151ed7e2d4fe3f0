"""Tests which of the possible limits hold the objectives."""

from itertools import pairwise

import pytest
from tests.engine.builders import make_facts

from conveyor_engine.objectives.candidates import Candidates, Objectives, Traffic, list_sizes
from conveyor_engine.scheduling.limits import Limits
from conveyor_engine.scheduling.step_cost import Coefficients

COST = Coefficients(0.010, 0.001, 0.0005)
FACTS = make_facts(max_num_seqs=64, max_num_batched_tokens=1024)


def choose(traffic: Traffic, **targets: float) -> Limits | None:
    limits = {"time_to_first_token": None, "inter_token_latency": None, "latency": None} | targets
    objectives = Objectives(**limits)
    return Candidates(objectives, FACTS, (), 0.0).choose(COST, traffic, objectives)


def make_traffic(prompt: int = 64, output: int = 64) -> Traffic:
    traffic = Traffic()
    for _ in range(1000):
        traffic.observe(32, 32, round(32 * prompt / output))
        traffic.observe_prompt(prompt)
    return traffic


def test_sizes_are_those_of_the_graphs_where_there_are_any() -> None:
    assert list_sizes(64, (1, 2, 4, 8, 16, 32, 48, 64)) == [8, 16, 32, 48, 64]
    assert list_sizes(256, (1, 2, 4, 8, 16, 32)) == [32, 256], "no graph is larger: the device had no room for it"


@pytest.mark.parametrize("declared", [1, 2, 3, 8, 32, 64, 100, 1024])
def test_without_graphs_neighbours_differ_by_an_eighth_down_to_an_eighth(declared: int) -> None:
    sizes = list_sizes(declared, ())
    assert sizes[0] == -(-declared // 8)
    assert sizes[-1] == declared
    assert sizes == sorted(set(sizes))
    assert all(size >= before * 9 / 8 for before, size in pairwise(sizes[:-1]))


def test_the_most_rows_hold_the_time_between_tokens_and_prompts_get_what_they_leave() -> None:
    chosen = choose(make_traffic(), inter_token_latency=0.060)
    assert chosen is not None
    assert 28 <= chosen.num_rows <= 33, "10 ms, and 1.5 ms for each row with the prompt token that it needs"
    assert COST.seconds(chosen.num_rows, chosen.prompt_tokens) == pytest.approx(0.060, abs=0.001)


def test_long_prompts_take_rows() -> None:
    short, long = (choose(make_traffic(prompt, 64), inter_token_latency=0.060) for prompt in (64, 256))
    assert short is not None
    assert long is not None
    assert long.num_rows < short.num_rows


def test_where_the_declared_limits_hold_the_objective_they_stay() -> None:
    assert choose(make_traffic(), inter_token_latency=1.0) == Limits(64, 1024)


def test_no_limits_hold_what_a_step_alone_exceeds() -> None:
    assert choose(make_traffic(), inter_token_latency=0.012) is None
    assert choose(make_traffic(), latency=0.012) is None


def test_first_tokens_come_sooner_in_shorter_steps() -> None:
    """A first token waits for the running step and for one step for each piece of its prompt."""
    chosen = choose(make_traffic(prompt=200), time_to_first_token=0.4)
    assert chosen is not None
    assert chosen == Limits(64, 256), "2 steps of 170 ms; 512 prompt tokens are two steps of 298"


def test_a_time_to_the_first_token_takes_no_rows() -> None:
    """This holds even if no limits hold the objective, because requests would only wait longer for rows."""
    assert choose(make_traffic(), time_to_first_token=0.012) == Limits(64, 1024)


def test_a_result_takes_the_step_that_runs_and_its_own() -> None:
    traffic = Traffic()
    for _ in range(1000):
        traffic.observe(10, 0, 200)
    chosen = choose(traffic, latency=0.3)
    assert chosen is not None
    assert 11 <= chosen.num_rows <= 13, "twice 10 ms, and 11 ms for each row of 20 tokens"
