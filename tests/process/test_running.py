"""Tests how a program begins and ends."""

import gc
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from conveyor_process.kinds import LOG_FORMAT, LOG_LEVEL
from conveyor_process.log import LogFormat
from conveyor_process.running import run_program
from conveyor_process.settings import Program, setting


@dataclass(frozen=True, slots=True)
class Settings:
    log_level: str = setting("INFO", "least level", LOG_LEVEL)
    log_format: LogFormat = setting("logfmt", "form", LOG_FORMAT)


PROGRAM = Program("conveyor_example", "An example.", Settings)


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def fail(_: Settings) -> None:
    raise RuntimeError("it broke")


def test_the_work_gets_the_settings_and_its_end_is_code_0(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[Settings] = []
    monkeypatch.setattr("sys.argv", ["conveyor_example", "--log-level=DEBUG"])
    assert run_program(PROGRAM, got.append) == 0
    assert got == [Settings(log_level="DEBUG")]


def test_an_error_is_an_event_of_the_log_and_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["conveyor_example"])
    assert run_program(PROGRAM, fail) == 1
    written = "".join(capsys.readouterr())
    assert "event=failed" in written
    assert "it broke" in written


def test_settings_that_cannot_be_used_are_one_sentence_and_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["conveyor_example", "--log-level=loud"])
    assert run_program(PROGRAM, fail) == 2
    assert capsys.readouterr().err.startswith("python -m conveyor_example: flag --log-level: ")


def test_what_was_there_before_the_work_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a full garbage collection delays every request while it visits the objects of all modules."""
    monkeypatch.setattr("sys.argv", ["conveyor_example"])
    before: list[object] = [[]]
    watched: list[bool] = []
    assert run_program(PROGRAM, lambda _: watched.append(any(known is before for known in gc.get_objects()))) == 0
    assert watched == [False]
