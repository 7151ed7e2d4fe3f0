"""Tests random histories of the scheduler in every mode, with the fake model of `generation_history`."""

import math
from collections import Counter

import pytest
from tests.engine.scheduling.generation_history import BLOCK_SIZE, History
from tests.engine.scheduling.histories import run_histories

from conveyor_engine.loop import step_runner
from conveyor_engine.wire import kv_tables


@pytest.mark.parametrize(("mode", "padding"), [("static", "real"), ("dynamic", None), ("continuous", None)])
def test_no_history_reads_a_block_before_a_window(
    monkeypatch: pytest.MonkeyPatch, mode: str, padding: str | None
) -> None:
    monkeypatch.setattr(step_runner._log, "disabled", True)
    monkeypatch.setattr(kv_tables, "TILE_TOKENS", BLOCK_SIZE)  # so that short requests free blocks too
    happened: Counter[str] = Counter()
    own = {"mode": mode, "padding": padding, "has_windows": True, "happened": happened}
    hardships = {"freed windows", "failed steps"}
    hardships |= set() if padding == "real" else {"found windows", "preemptions", "accepted drafts", "rejected drafts"}
    run_histories(type("WindowHistory", (History,), own), happened, hardships, number=100)


def test_a_batch_of_finished_rows_ends_when_the_last_preempted_one_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random history found this: the rows had nothing to compute, and ended one turn later."""
    monkeypatch.setattr(kv_tables, "TILE_TOKENS", BLOCK_SIZE)
    own = {"mode": "static", "padding": "real", "has_windows": True, "happened": Counter[str]()}
    history: History = type("WindowHistory", (History,), own)()
    history.begin(
        num_kv_blocks=10, max_num_seqs=4, prefix_caching=True, num_ahead=1, fails_late=False, drains=False,
        has_states=False, class_shares=(), tables=(1, 1), window=1, encodes_beside=False, speculates="",
    )  # fmt: skip
    long = [*range(100, 108), *range(200, 208)]
    for prompts in ([[5]], [[5], long]):
        history.add(
            constrained=0, level=0, max_tokens=1, num_choices=1, prompts=prompts, scored=False, timeout=math.inf,
            together=False,
        )  # fmt: skip
    history.finish(10)


@pytest.mark.parametrize(
    ("mode", "padding"),
    [("none", None), ("static", "none"), ("static", "real"), ("dynamic", None), ("continuous", None)],
)
def test_no_history_loses_a_block_a_request_or_the_order(
    monkeypatch: pytest.MonkeyPatch, mode: str, padding: str | None
) -> None:
    monkeypatch.setattr(step_runner._log, "disabled", True)  # thousands of failed steps
    happened: Counter[str] = Counter()
    machine = type("ModeHistory", (History,), {"mode": mode, "padding": padding, "happened": happened})
    own = {"length", "abort", "error", "failed steps", "late errors", "turns taken from others", "constrained tokens"}
    own |= {"better levels", "full shares", "scored prompts", "rows that sit out", "stop_string"}
    own |= {"preemptions"} if mode != "none" else set()
    own |= {"held rows"} if mode == "static" else {"discarded results"}
    own |= {"withdrawn steps"} if mode in ("none", "continuous") else set()
    own |= {"padding"} if padding == "real" else {"prefix hits"}
    own |= {"wanted images"} if mode == "continuous" else {"deadline"}
    own |= {"accepted drafts", "rejected drafts"} if mode != "static" else set()
    run_histories(machine, happened, own)
    rare = {"discarded results", "withdrawn steps", "deadline", "preemptions", "unclaimed steps"}  # in some modes
    assert own <= set(+happened) <= own | rare
