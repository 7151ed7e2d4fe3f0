"""Objectives under traffic that changes, in virtual time: the product's core, scheduler and steering."""

import re

import pytest

from conveyor_bench.objectives import command
from conveyor_bench.objectives.compared import Comparison
from conveyor_bench.objectives.shapes import SHAPES, Scale, draw_requests
from conveyor_bench.objectives.virtual import REQUESTS_PER_SECOND, VOCABULARY, System, run
from e2e.cluster.paths import REPOSITORY

OBJECTIVE = 0.1  # seconds between two tokens
SCALE = Scale(REQUESTS_PER_SECOND, seconds=50)
FIXED = ((16, 128), (32, 128))  # rows and tokens: those with the most throughput that hold it, for these shapes


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_the_time_between_tokens_is_held_with_nine_tenths_of_the_best_fixed_limit_s_throughput(name: str) -> None:
    requests = draw_requests(SHAPES[name], SCALE, 1, VOCABULARY)
    fixed = {each: run(System(max_num_seqs=each[0], max_num_batched_tokens=each[1]), requests) for each in FIXED}
    steered = run(System(inter_token_latency=OBJECTIVE), requests)
    compared = Comparison(name, OBJECTIVE, steered, fixed)
    assert compared.best is not None
    assert compared.p95_of_objective <= 1.1
    assert compared.share_of_best >= 0.9
    assert len(steered.first) == len(requests), "nothing is dropped"


def test_the_declared_limits_alone_do_not_hold_it() -> None:
    requests = draw_requests(SHAPES["step"], SCALE, 1, VOCABULARY)
    assert run(System(), requests).p95("between") > 1.5 * OBJECTIVE


# With the documented length of a run it computes the page's table: at night, because a test above has its best limits.
@pytest.mark.slow
@pytest.mark.parametrize("shorter", [["--seconds", "5"], pytest.param([], marks=pytest.mark.nightly)], ids=str)
def test_the_command_compares_every_shape(capsys: pytest.CaptureFixture[str], shorter: list[str]) -> None:
    (flags,) = re.findall(r"-m conveyor_bench objectives (.*)", (REPOSITORY / "docs/objectives.md").read_text())
    code = command.main([*flags.split(), *shorter])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [f"shape={name}" for name in SHAPES]
    assert code == 0 or shorter, "so short a run may miss"
    assert shorter or all("best_fixed=none" not in line for line in lines)
