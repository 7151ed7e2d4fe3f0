"""Checks that recorded traces are read unchanged, or rejected with a line number, and that drawn ones have the
percentiles."""

import json

import pytest

from conveyor_load.traces import Arrival, Lengths, draw_trace, parse_lengths, read_trace

LINES = [
    {"timestamp": 4000, "input_length": 300, "output_length": 20},
    {"timestamp": 1000, "input_length": 100, "output_length": 10, "hash_ids": [1, 2]},
    {"timestamp": 1500, "input_length": 200, "output_length": 0},
]


def write(*objects: object) -> list[str]:
    return [json.dumps(each) for each in objects]


def test_a_recorded_trace_begins_at_zero_and_keeps_its_gaps() -> None:
    trace = read_trace([*write(*LINES), "\n"])
    assert trace.arrivals == (Arrival(0.0, 100, 10), Arrival(0.5, 200, 0), Arrival(3.0, 300, 20))
    assert trace.rate == pytest.approx(2 / 3)


def test_a_trace_at_another_rate_keeps_its_pattern_and_starts_again_where_it_ends() -> None:
    trace = read_trace(write(*LINES))
    faster = trace.at_rate(4, 2)  # in a sixth of the time, and three requests every 0.75 s
    assert [arrival.at for arrival in faster.arrivals[:4]] == pytest.approx([0, 1 / 12, 0.5, 0.75])
    assert len(faster.arrivals) == 8
    assert [arrival.input_tokens for arrival in faster.arrivals] == [100, 200, 300, 100, 200, 300, 100, 200]
    assert all(arrival.at < 2 for arrival in faster.arrivals)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 3: "),
        ("[1]", "line 3: it must be a JSON object"),
        ('{"timestamp": 1, "input_length": 1}', "line 3: 'output_length' is missing"),
        ('{"timestamp": -1, "input_length": 1, "output_length": 1}', "line 3: timestamp must be milliseconds"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1}', "line 3: timestamp must be milliseconds"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}', "line 3: input_length must be a whole number"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1e9}', "line 3: output_length must be"),
        ("[" * 60_000, "line 3: "),
        ("x" * 70_000, "line 3: a line has at most"),
    ],
)
def test_what_is_no_request_is_named_by_its_line(line: str, message: str) -> None:
    with pytest.raises(ValueError, match="line 3") as raised:
        read_trace([*write(*LINES[:2]), line])
    assert str(raised.value).startswith(message)


def test_a_trace_needs_a_rate() -> None:
    with pytest.raises(ValueError, match="two requests"):
        read_trace(write(LINES[0]))
    with pytest.raises(ValueError, match="there is no rate"):
        read_trace(write(LINES[0], LINES[0]))


def test_drawn_lengths_have_their_percentiles_and_arrivals_their_rate() -> None:
    trace = draw_trace(Lengths(200, 800), Lengths(50, 50), 20_000)
    inputs = sorted(arrival.input_tokens for arrival in trace.arrivals)
    assert inputs[10_000] == pytest.approx(200, rel=0.05)
    assert inputs[19_000] == pytest.approx(800, rel=0.05)
    assert {arrival.output_tokens for arrival in trace.arrivals} == {50}
    assert trace.rate == pytest.approx(1, rel=0.05)
    assert draw_trace(Lengths(200, 800), None, 5).arrivals[3].output_tokens == 0
    assert draw_trace(Lengths(200, 800), None, 5) == draw_trace(Lengths(200, 800), None, 5)


def test_requests_are_cut_to_the_context() -> None:
    assert read_trace(write(*LINES)).fit(210).arrivals[1:] == (Arrival(0.5, 200, 0), Arrival(3.0, 209, 1))


def test_lengths_are_one_number_or_two() -> None:
    assert parse_lengths("64") == (64, 64)
    assert parse_lengths("64,256") == (64, 256)
    for wrong in ("", "0", "256,64", "1,2,3", "-1", "x", "9999999999"):
        with pytest.raises(ValueError, match="P50 and P95"):
            parse_lengths(wrong)
