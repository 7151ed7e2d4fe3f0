"""Tests how the file of adapters is followed, with real downloads and an engine that takes each adapter."""

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from conveyor_engine.errors import ModelError
from conveyor_engine.serving import adapter_file
from conveyor_engine.serving.adapter_file import AdapterFile
from conveyor_protocol.failure_reasons import FailureReason


class Engine:
    """Takes each adapter while `takes` is set. The first `num_errors` calls of `has_requests` fail."""

    def __init__(self, num_errors: int = 0) -> None:
        self.num_errors = num_errors
        self.takes = asyncio.Event()
        self.takes.set()
        self.waiting = 0
        self.busy: set[int] = set()
        self.unloaded: list[int] = []

    async def load_adapter(self, number: int, name: str, directory: str) -> None:
        self.waiting += 1
        await self.takes.wait()
        self.waiting -= 1

    def has_requests(self, number: int) -> bool:
        self.num_errors -= 1
        if self.num_errors >= 0:
            raise RuntimeError("no answer")
        return number in self.busy

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


def _follow(file: Path, engine: Engine, folder: str = "") -> tuple[AdapterFile, "asyncio.Task[None]"]:
    adapters = AdapterFile(file, {}, engine, folder)  # type: ignore[arg-type]
    return adapters, asyncio.create_task(adapters.follow())


async def test_an_error_of_the_system_is_a_failed_attempt_and_not_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(tmp_path / "sql")
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


async def test_a_download_that_nothing_names_is_removed_from_the_pod_s_own_volume(tmp_path: Path) -> None:
    file, engine, kept = tmp_path / "adapters.yaml", Engine(), tmp_path / "kept"
    folder = tmp_path / "folder"
    for path in (folder, kept):
        path.mkdir()
    for name in ("a", "b"):
        _save(folder / name)
    _save(folder / "a" / "inner")
    _save(kept / "c")
    (folder / ".a.partial").mkdir()

    def write(**folders: str) -> None:
        content = {name: {"uri": f"pvc://team/{at}", "directory": str(folder / at)} for name, at in folders.items()}
        kept_one = {"two": {"uri": "pvc://team/c", "directory": str(kept / "c")}} if "same" in folders else {}
        file.write_text(json.dumps(content | kept_one))

    write(one="a", same="a", inner="a/inner")
    adapters, following = _follow(file, engine, str(folder))
    await _until(lambda: {each.state for each in adapters.states.values()} == {"Ready"})
    write(one="a", inner="a/inner")
    await _until(lambda: len(engine.unloaded) == 2)
    assert (folder / "a").exists(), "another adapter has the same folder"

    engine.takes.clear()
    write(one="b", inner="a/inner")
    await _until(lambda: engine.waiting == 1)
    write(inner="a/inner")
    await _until(lambda: "one" not in adapters.states)
    await asyncio.sleep(0.1)
    assert (folder / "b").exists(), "the engine reads it"
    engine.takes.set()
    await _until(lambda: not (folder / "b").exists())
    assert (folder / "a" / "inner").exists(), "another adapter has a folder in it"
    write()
    await _until(lambda: not (folder / "a").exists() and not (folder / ".a.partial").exists())
    assert (kept / "c").exists(), "other pods may use it"
    following.cancel()


@pytest.mark.parametrize("after", ["", "b"])
async def test_the_files_of_a_removed_or_replaced_adapter_stay_until_no_request_has_it(
    tmp_path: Path, after: str
) -> None:
    file, engine, folder = tmp_path / "adapters.yaml", Engine(), tmp_path / "folder"
    folder.mkdir()
    for name in ("a", "b"):
        _save(folder / name)
    file.write_text(json.dumps({"sql": {"directory": str(folder / "a")}}))
    adapters, following = _follow(file, engine, str(folder))
    await _until(lambda: adapters.is_settled)
    engine.busy = {1}
    file.write_text(json.dumps({"sql": {"directory": str(folder / after)}} if after else {}))
    await _until(lambda: 1 in adapters._retired)
    await asyncio.sleep(0.1)
    assert not engine.unloaded
    assert (folder / "a").exists(), "the engine may have to read it again for a request that waits"
    engine.busy = set()
    await _until(lambda: engine.unloaded == [1] and not (folder / "a").exists())
    following.cancel()


async def test_a_download_that_went_from_the_file_while_the_engine_did_not_run_is_removed(tmp_path: Path) -> None:
    folder, file = tmp_path / "folder", tmp_path / "adapters.yaml"
    for name in ("gone", "wanted"):
        (folder / "hf" / name).mkdir(parents=True)
        (folder / "hf" / name / ".conveyor-complete.json").write_text("{}")
    (folder / "hf" / ".unfinished.partial").mkdir()
    file.write_text("wanted: {")
    _, following = _follow(file, Engine(), str(folder))
    await asyncio.sleep(0.1)
    assert (folder / "hf" / "gone").exists(), "the file cannot be read, so nothing is known"
    file.write_text(json.dumps({"wanted": {"directory": str(folder / "hf" / "wanted")}}))
    await _until(lambda: sorted(path.name for path in (folder / "hf").iterdir()) == ["wanted"])
    following.cancel()


async def test_an_adapter_that_the_engine_cannot_load_again_is_brought_again(tmp_path: Path) -> None:
    file, engine = tmp_path / "adapters.yaml", Engine()
    file.write_text(f"sql: {{directory: {tmp_path}}}")
    adapters, following = _follow(file, engine)
    await _until(lambda: adapters.is_settled)
    engine.takes.clear()
    engine.on_adapter_lost(1, ModelError("no sql", reason=FailureReason.MODEL_NOT_FOUND))  # type: ignore[attr-defined]
    state = adapters.states["sql"]
    assert (state.state, state.message, state.serves) == ("Failed", "no sql", False)
    engine.takes.set()
    await _until(lambda: adapters.states["sql"].serves)
    following.cancel()


async def test_a_report_of_many_failures_has_some_of_their_messages(tmp_path: Path) -> None:
    file = tmp_path / "adapters.yaml"
    file.write_text(json.dumps({f"a{number}": {"uri": "pvc://a/b", "directory": "/none"} for number in range(60)}))
    adapters, following = _follow(file, Engine())
    adapters._look()
    for name, source in adapters._sources.items():
        adapters._fail(name, source, ModelError("x" * 1000, reason=FailureReason.MODEL_NOT_FOUND))
    messages = [len(state.message) for state in adapters.report().values()]
    assert sorted(messages) == [0] * 10 + [500] * 50
    following.cancel()


def _save(folder: Path) -> None:
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    save_file({"a": np.zeros(1)}, folder / "adapter_model.safetensors")
