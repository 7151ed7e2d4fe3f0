"""Tests the pictures of steps and of values over time, and the history that they show."""

from dataclasses import replace

import pytest

from conveyor_console.figures import Figures
from conveyor_console.history import MAX_POINTS, History
from conveyor_console.overview import build_line
from conveyor_console.pictures import LINES_HEIGHT, STEPS_HEIGHT, WIDTH, draw_lines, draw_steps, show_time
from conveyor_console.requests import Requests
from conveyor_console.services import Condition, Service
from conveyor_protocol.engine_pages import StepRecord

WELL = Service("team", "qwen", Condition("True", "Ready", ""), ready_replicas=1, desired_replicas=2)


def step(ended: float, seconds: float = 1.0, rows: int = 4, padding: float = 0.0, by: str | None = None) -> StepRecord:
    return StepRecord(ended, seconds, rows, 100, 0, 4, padding, 0, by)


def test_a_bar_is_as_wide_as_its_step_took_and_as_high_as_it_had_rows() -> None:
    picture = draw_steps("a:1", [step(1, rows=4), step(2, rows=2, padding=0.5), step(4, 2, rows=1)])
    first, second, third = picture.bars
    assert (first.x, first.width, first.y, first.height) == (0, WIDTH / 4, 0, STEPS_HEIGHT)
    assert (second.x, second.height, second.padding) == (WIDTH / 4, STEPS_HEIGHT / 2, STEPS_HEIGHT / 4)
    assert third.x + third.width == WIDTH
    assert third.y == STEPS_HEIGHT * 3 / 4
    assert picture.most_rows == 4


def test_a_long_pause_takes_a_small_part_of_the_picture() -> None:
    before, after = draw_steps("a:1", [step(1), step(1000)]).bars
    gap = after.x - before.x - before.width
    assert 0 < gap < 0.05 * WIDTH
    assert after.x + after.width == pytest.approx(WIDTH, abs=0.02)


def test_the_summary_says_rows_padding_and_why_batches_closed() -> None:
    picture = draw_steps("a:1", [step(1, by="full"), step(2, padding=0.2), step(3, by="window"), step(4, by="full")])
    assert picture.summary == (
        "4 steps in 4.00 s of work: 4.0 rows on average, 5% padding; batches closed by full 2, window 1."
    )
    assert picture.bars[0].closed
    assert "batch closed by full" in picture.bars[0].title


def test_lines_have_one_scale_and_leave_out_what_is_not_known() -> None:
    nan = float("nan")
    chart = draw_lines("Requests", [0, 10, 20], queued=[0, nan, 4], at_engines=[8, 8, nan])
    assert chart.top == "8"
    assert chart.seconds == 20
    assert [curve.last for curve in chart.curves] == ["4", "–"]
    assert chart.curves[0].points == f"0.0,{LINES_HEIGHT:.1f} {WIDTH:.1f},{LINES_HEIGHT / 2:.1f}"
    assert draw_lines("Requests", [], queued=[]).curves[0].points == ""


def test_times_of_hostile_engines_are_shown_as_unknown() -> None:
    assert show_time(1e300) == "?"
    assert show_time(0) == "00:00:00"


def test_the_history_has_fifteen_minutes_and_forgets_services_that_are_gone() -> None:
    history = History()
    for tick in range(MAX_POINTS + 10):
        lines = [build_line(WELL, Requests(queued=tick), Figures())]
        if tick == MAX_POINTS:
            lines.append(build_line(replace(WELL, name="gone"), None, None))
        history.add(lines, float(tick))
    course = history.find_course("team/qwen")
    assert list(course.times) == [float(tick) for tick in range(10, MAX_POINTS + 10)]
    assert course.queued[-1] == MAX_POINTS + 9
    assert set(course.desired) == {2}
    assert list(history.find_course("team/gone").times) == []


def test_each_decision_is_kept_once_and_the_newest_comes_first() -> None:
    history = History()
    for tick, words in enumerate(("", "1 replicas", "1 replicas", "scaled 1 -> 2", "1 replicas")):
        history.add([build_line(replace(WELL, scaling=words), None, None)], float(tick))
    assert history.list_decisions("team/qwen") == [(4.0, "1 replicas"), (3.0, "scaled 1 -> 2"), (1.0, "1 replicas")]
    assert history.list_decisions("team/other") == []
