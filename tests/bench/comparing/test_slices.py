"""Tests slices with invented figures: which count, what they give together, and when they are enough."""

import pytest

from conveyor_bench.comparing import slices, turns
from conveyor_bench.comparing.slices import Slice, Turn
from conveyor_bench.comparing.summary import summarise
from conveyor_bench.comparing.systems import Workload

WORKLOAD = Workload(requests=4, input_tokens=8, output_tokens=11)


def turn(ours: float, peer: float, *, tokens: int = 0, stolen: tuple[float, float] = (0.0, 0.0)) -> Turn:
    """Make a turn with the seconds of both systems, for the prompts or for this number of tokens after them."""
    pair = {"conveyor": (ours, stolen[0]), "peer": (peer, stolen[1])}
    parts = {name: Slice(tokens or 1, seconds, share) for name, (seconds, share) in pair.items()}
    return Turn("decode" if tokens else "prefill", parts)


def test_a_run_is_put_together_from_the_median_pace_of_each_phase() -> None:
    measured = [turn(3, 6), turn(1, 4), turn(2, 5), turn(1, 3, tokens=5), turn(0.4, 1.2, tokens=2)]
    assert slices.seconds(measured, "conveyor", 11).value == pytest.approx(2 + 10 * 0.2)
    assert slices.seconds(measured, "peer", 11).value == pytest.approx(5 + 10 * 0.6)
    assert slices.seconds(measured, "conveyor", 1).value == 2


def test_the_ratio_is_of_pairs_weighed_by_our_time_in_each_phase() -> None:
    measured = [turn(1, 2), turn(10, 20), turn(2, 4), *(turn(s, 6 * s, tokens=10) for s in (6, 0.5, 60))]
    assert slices.ratio(measured, "conveyor", "peer", 11).value == pytest.approx(0.25 * 2 + 0.75 * 6)
    assert slices.ratio(measured, "conveyor", "peer", 11).spread == pytest.approx(0)
    assert slices.seconds(measured, "conveyor", 11).spread > 1, "what both systems meet is not in the ratio"


def test_the_spread_is_half_of_the_medians_interval_and_shrinks_with_more_figures() -> None:
    five = [1.0, 100.0, 3.0, 2.0, 4.0]
    assert slices.estimate(five) == slices.Estimate(3.0, pytest.approx(1.57 * 2 / 5**0.5 / 3), 5)
    assert slices.estimate(five * 20).spread == pytest.approx(1.57 * 2 / 100**0.5 / 3)
    assert slices.estimate([7.0]) == slices.Estimate(7.0, 0, 1)
    assert slices.estimate([]) is None


def test_a_slice_of_which_the_host_took_more_than_a_twentieth_is_dropped_and_its_pair_with_it() -> None:
    disturbed = [turn(50, 5, stolen=(0.051, 0)), turn(5, 50, stolen=(0, 0.2)), turn(1, 3, stolen=(0.05, 0.05))]
    assert slices.phase_ratio(disturbed, "prefill", "conveyor", "peer") == slices.Estimate(3, 0, 1)
    assert [slices.dropped(disturbed, name) for name in ("conveyor", "peer")] == [1, 1]
    assert slices.seconds(disturbed, "conveyor", 1).value == 3, "of its own two"


def test_a_phase_without_a_slice_that_counts_leaves_no_figure() -> None:
    measured = [turn(1, 2), turn(1, 2, tokens=10, stolen=(0, 0.5))]
    assert slices.ratio(measured, "conveyor", "peer", 11) is None
    assert slices.ratio([turn(1, 2, stolen=(0.5, 0))], "conveyor", "peer", 11) is None
    told = summarise([measured], WORKLOAD)
    assert (told["output_tokens_per_second"], told["settled"]) == (22, False)
    assert told["peers"]["peer"]["ratio"] is told["peers"]["peer"]["output_tokens_per_second"] is None
    assert told["dropped"] == {"conveyor": 0, "peer": 1}
    assert told["rounds"] == {"conveyor": [22], "peer": [11]}, "every slice"


def test_rounds_too_short_for_a_slice_are_taken_together_phase_by_phase() -> None:
    short = [turn(0.1, 0.2, stolen=(0.4, 0)), turn(0.3, 0.5, tokens=10)]
    both = slices.pool([short, [turn(0.3, 0.2), turn(0.5, 0.9, tokens=10)], [turn(2, 3), *[turn(1, 1, tokens=4)] * 2]])
    assert [t.phase for t in both] == ["prefill", "decode", "prefill", "decode", "decode"]
    assert both[0].slices == {"conveyor": Slice(2, 0.4, pytest.approx(0.1)), "peer": Slice(2, 0.4, 0)}
    assert both[1].slices == {"conveyor": Slice(20, 0.8, 0), "peer": Slice(20, 1.4, 0)}
    assert len(slices.pool([short] * 20)) == 2 * 6, "0.4 s of ours in each, and the last two with the six before"
    assert len(slices.pool([short])) == 2
    assert slices.pool([]) == []


def test_it_is_settled_by_the_ratio_and_by_enough_pairs_of_each_phase() -> None:
    paces = (1, 2, 3, 4, 5)
    measured = [*(turn(s, 2 * s) for s in paces), *(turn(s, s, tokens=5) for s in paces)]
    assert turns.settled(measured, WORKLOAD)
    assert not turns.settled(measured[1:], WORKLOAD), "four pairs of prompts"
    assert not turns.settled([*measured, *(turn(1, r) for r in (1, 1, 1, 3, 3, 3))], WORKLOAD)
    alone = [Turn(t.phase, {"conveyor": t.slices["conveyor"]}) for t in measured]
    assert not turns.settled(alone, WORKLOAD), "no peer: our own paces"
    assert not turns.settled([], WORKLOAD)


def test_the_summary_names_what_it_took() -> None:
    told = summarise([[turn(1, 2), turn(1, 6, tokens=10)], [turn(1, 2), turn(1, 6, tokens=10)]], WORKLOAD)
    assert (told["output_tokens_per_second"], told["spread"], told["settled"]) == (22, 0, False)
    decode = {"ratio": 6, "spread": 0, "pairs": 2}
    phases = {"prefill": {"ratio": 2, "spread": 0, "pairs": 2}, "decode": decode}
    assert told["peers"]["peer"] == {"output_tokens_per_second": 5.5, "ratio": 4, "spread": 0, "phases": phases}
    assert told["slices"] == {"conveyor": 4, "peer": 4}
