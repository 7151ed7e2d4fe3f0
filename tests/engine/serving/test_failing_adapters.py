"""An adapter that an error of the system keeps away is a failed attempt as others are, and the file is followed on."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.engine.lora import save_adapter

from conveyor_engine.serving import adapter_file
from conveyor_engine.serving.adapter_file import AdapterFile
from conveyor_protocol.failure_reasons import FailureReason


class Engine:
    """Takes each adapter. The first `num_errors` calls of `has_unsent` fail."""

    def __init__(self, num_errors: int = 0) -> None:
        self.num_errors = num_errors
        self.unloaded: list[int] = []

    async def load_adapter(self, number: int, name: str, directory: str) -> None:
        pass

    def has_unsent(self, number: int) -> bool:
        self.num_errors -= 1
        if self.num_errors >= 0:
            raise RuntimeError("no answer")
        return False

    def unload_adapter(self, number: int) -> None:
        self.unloaded.append(number)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_POLL_SECONDS", "_FIRST_WAIT_SECONDS", "_PREPARING_SECONDS"):
        monkeypatch.setattr(adapter_file, name, 0.01)


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110  # it polls, as the code under test does
            await asyncio.sleep(0.01)


def _follow(file: Path, engine: Engine) -> tuple[AdapterFile, "asyncio.Task[None]"]:
    adapters = AdapterFile(file, {}, engine)  # type: ignore[arg-type]
    return adapters, asyncio.create_task(adapters.follow())


async def test_an_error_of_the_system_is_a_failed_attempt_and_not_the_last(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_adapter(chat_model, tmp_path / "sql", 1)
    file, python = tmp_path / "adapters.yaml", sys.executable
    file.write_text(f"sql: {{uri: 'pvc://team/sql', directory: {tmp_path / 'sql'}}}")

    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))  # so the download's process cannot be started
    adapters, following = _follow(file, Engine())
    await _until(lambda: adapters.is_settled)
    state = adapters.states["sql"]
    assert (state.state, state.reason, state.serves) == ("Failed", FailureReason.ENGINE_ERROR, False)
    assert state.message.startswith("the adapter 'sql' cannot be used: FileNotFoundError: ")
    monkeypatch.setattr(sys, "executable", python)
    await _until(lambda: adapters.states["sql"].state == "Ready")
    following.cancel()


async def test_the_file_is_followed_on_after_an_unexpected_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "adapters.yaml"
    file.write_text(f"sql: {{directory: {tmp_path}}}")

    engine = Engine(num_errors=2)
    adapters, following = _follow(file, engine)
    await _until(lambda: adapters.is_settled)
    assert adapters.states["sql"].state == "Ready"
    file.write_text("{}")
    await _until(lambda: engine.unloaded == [1])
    following.cancel()
    assert "event=adapters_file_not_followed" in caplog.text
