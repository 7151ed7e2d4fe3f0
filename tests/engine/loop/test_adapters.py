"""Adapters are loaded and unloaded between steps: answers equal those of PEFT before, during and after."""

import json
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from itertools import count
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tests.engine.lora import answer, save_adapter
from tests.engine.references import Reference, add, tokens_of

from conveyor_engine import cgroup
from conveyor_engine.errors import InvalidRequest
from conveyor_engine.execution.models import adapter_files
from conveyor_engine.execution.models.adapters import AdaptedLinear, NativeAdaptedLinear
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.wire.messages import AdapterFailed, AdapterLoaded, LoadAdapter
from conveyor_engine.wire.request import FinishReason, RequestOutput
from conveyor_protocol.failure_reasons import FailureReason

Result = AdapterLoaded | AdapterFailed
GetReference = Callable[[str], Reference]
TARGETS = (["q_proj", "v_proj"], ["k_proj", "down_proj"], "all-linear")


class Running:
    """A tiny model, three adapters that change different layers, PEFT's answers, and an engine without adapters."""

    def __init__(self, ref: Reference, folder: Path) -> None:
        self.ref, self.folder = ref, folder
        self.answers = [ref.answers]
        for number, (rank, targets) in enumerate(zip((2, 40, 3), TARGETS, strict=True), start=1):
            model = save_adapter(ref.directory, folder / str(number), number, r=rank, target_modules=targets)
            self.answers.append(answer(model, ref.prompts))

    def open(self, **changes: object) -> "Session":
        return Session(self, self.ref.make_core(adapters_file="f", max_num_seqs=8, **changes))


class Session:
    def __init__(self, running: Running, core: EngineCore) -> None:
        self.running, self.core = running, core
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.sent: dict[str, tuple[int, int]] = {}
        self.results: list[Result] = []
        self.now, self.num_loading = 0.0, 0

    def send(self, number: int, adapter: int, prompt: int = 2) -> str:
        """Send a prompt with the adapter `number` of the engine, which is `adapter` of the folder."""
        name = f"{len(self.sent)}"
        add(self.core, name, self.running.ref.prompts[prompt], number)
        self.sent[name] = adapter, prompt
        return name

    def turn(self) -> None:
        results = self.core.adapters.advance(self.now)
        self.results += results
        self.num_loading -= len(results)
        for output in self.core.step(self.now):
            self.outputs.setdefault(output.request_id, []).append(output)

    def load(self, number: int, adapter: str) -> None:
        self.num_loading += 1
        self.core.adapters.load(LoadAdapter(number, f"a{number}", str(self.running.folder / adapter)))

    def read(self) -> None:
        """Wait until an adapter's files are read."""
        self.results += self.core.adapters.advance(self.now)
        while not self.core.adapters.is_due:
            time.sleep(0.01)

    def settle(self) -> list[Result]:
        while self.num_loading or self.core.has_unfinished() or self.core.adapters.is_due:
            self.turn()
        results, self.results = self.results, []
        return results

    def check(self) -> None:
        """Compare all answers so far with PEFT's."""
        self.settle()
        found = {name: tokens_of(self.outputs[name]) for name in self.sent}
        assert found == {name: self.running.answers[adapter][prompt] for name, (adapter, prompt) in self.sent.items()}


@pytest.fixture(scope="module")
def running(reference: GetReference, tmp_path_factory: pytest.TempPathFactory) -> Running:
    return Running(reference("qwen3"), tmp_path_factory.mktemp("adapters"))


CHANGES = pytest.mark.parametrize("changes", [
    {"attention_backend": "torch"},
    {"attention_backend": "auto"},
    {"attention_backend": "auto", "overlap": True},
    {"attention_backend": "auto", "capture": lambda work: work},
    {"attention_backend": "auto", "capture": lambda work: work, "overlap": True},
])  # fmt: skip


@CHANGES
def test_answers_equal_pefts_before_during_and_after_each_change(running: Running, changes: dict[str, object]) -> None:
    session = running.open(**changes)
    session.send(0, 0)
    for number in (1, 2, 3):
        session.load(number, str(number))
    for turns in count():
        if turns % 9 == 0:
            for number in filter(session.core.adapters.has, range(4)):
                session.send(number, number, turns % 6)
        session.turn()
        if session.core.adapters.has(3):
            break
    session.check()
    assert session.core.adapters.has(3)
    for prompt in range(6):
        session.send(1, 1, prompt)
        session.send(2, 2, prompt)
        session.send(3, 3, prompt)
    session.core.adapters.unload(1)
    session.load(4, "3")
    session.core.adapters.unload(2)
    session.check()
    session.send(4, 3)
    session.send(3, 3)
    session.send(0, 0)
    session.check()


@CHANGES
@pytest.mark.parametrize("num_slots", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_answers_equal_pefts_with_more_adapters_than_slots(
    running: Running, changes: dict[str, object], num_slots: int
) -> None:
    session = running.open(adapter_slots=num_slots, **changes)
    for number in (1, 2, 3):
        session.load(number, str(number))
    assert session.settle() == [AdapterLoaded(number) for number in (1, 2, 3)]
    for turn in range(30):
        session.send(turn % 4, turn % 4, turn % 6)
        session.send(turn * 7 % 3 + 1, turn * 7 % 3 + 1, turn % 5)
        session.turn()
    session.core.adapters.unload(2)
    session.check()
    for number in (1, 3):
        session.send(number, number)
    session.check()
    assert len(session.core.scheduler.slots or ()) == num_slots


def test_no_layer_changes_while_a_step_begins(running: Running) -> None:
    session = running.open(overlap=True)
    session.load(1, "1")
    session.settle()
    begins, goes_on = threading.Event(), threading.Event()

    def pause(*_: object) -> None:
        begins.set()
        assert goes_on.wait(60)

    layer = session.core.executor.model.model.layers[0]  # type: ignore[attr-defined]
    hook = layer.register_forward_pre_hook(pause)
    session.send(1, 1)
    session.turn()
    assert begins.wait(60)
    hook.remove()
    session.load(2, "2")
    session.read()
    columns = session.core.executor._adapters.of_step  # type: ignore[attr-defined]
    before = columns.num_columns
    turns = ThreadPoolExecutor(1)
    turn = turns.submit(session.turn)
    with pytest.raises(FutureTimeout):
        turn.result(0.5)
    assert columns.num_columns == before
    goes_on.set()
    turn.result()
    session.check()
    assert columns.num_columns > before


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_an_adapters_trial_arrives_when_it_is_sent(running: Running, mode: str) -> None:
    session = running.open(batching_mode=mode, batching_window_seconds=60.0)
    session.now = 1e5
    session.load(1, "1")
    while not session.core.scheduler.requests:
        session.turn()
    session.turn()
    assert not session.results
    session.now += 61
    assert session.settle() == [AdapterLoaded(1)]
    assert session.core.stats().batch_wait_seconds == 61


def test_files_that_change_after_they_are_read_change_nothing(running: Running, tmp_path: Path) -> None:
    session = running.open()
    shutil.copytree(running.folder / "3", tmp_path / "3")
    session.load(1, str(tmp_path / "3"))
    session.read()
    (tmp_path / "3" / "adapter_model.safetensors").write_bytes(b"")
    assert session.settle() == [AdapterLoaded(1)]
    session.send(1, 3)
    session.check()
    session.load(2, str(tmp_path / "3"))
    (failed,) = session.settle()
    assert isinstance(failed, AdapterFailed)
    assert failed.reason is FailureReason.MODEL_UNREADABLE


def test_a_volume_that_hangs_delays_no_step_and_no_other_adapter(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = running.open()
    session.load(1, "1")
    session.settle()
    answers_again, read = threading.Event(), adapter_files.read_object
    monkeypatch.setattr(adapter_files, "read_object", lambda path: answers_again.wait(60) and read(path))
    session.load(2, "2")
    session.send(1, 1)
    session.send(0, 0)
    session.core.adapters.unload(1)
    while session.core.has_unfinished() or session.core.adapters.is_due:
        session.turn()
    assert session.num_loading == 1
    assert session.core.executor._adapters.of_step.find_free(32).start == 0  # type: ignore[attr-defined]
    answers_again.set()
    assert session.settle() == [AdapterLoaded(2)]
    session.check()


def fail_to_read(session: Session) -> str:
    session.load(9, "1")
    (failed,) = session.settle()
    assert isinstance(failed, AdapterFailed)
    return failed.message


def test_a_file_that_is_too_large_is_not_read(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    session = running.open()
    monkeypatch.setattr(adapter_files, "WEIGHTS_BYTES_MAX", 1000)
    assert "bytes, but at most 1000 are read" in fail_to_read(session)


def test_what_steps_need_later_is_not_free_for_files_and_copies(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = running.open(adapter_slots=1)
    session.load(1, "1")
    session.load(2, "2")
    session.settle()
    assert len(session.core.adapters._copies) == 2
    session.core.executor._adapters.reserved_bytes = reserved_bytes = 1 << 30  # type: ignore[attr-defined]
    num_bytes = (running.folder / "1" / "adapter_model.safetensors").stat().st_size
    monkeypatch.setattr(cgroup, "free_memory_bytes", lambda: reserved_bytes + 3 * num_bytes)
    session.load(3, "1")
    assert session.settle() == [AdapterLoaded(3)]
    assert list(session.core.adapters._copies) == [3]
    monkeypatch.setattr(cgroup, "free_memory_bytes", lambda: reserved_bytes + 1000)
    assert "bytes, and twice as many are not free in memory" in fail_to_read(session)


def test_the_next_adapter_gets_the_columns_of_one_that_left(running: Running) -> None:
    session = running.open(attention_backend="auto")
    session.load(1, "2")
    session.load(2, "1")
    assert session.settle() == [AdapterLoaded(1), AdapterLoaded(2)]
    adapters = session.core.executor._adapters.of_step  # type: ignore[attr-defined]
    columns = adapters.num_columns
    for number in range(3, 12):
        session.core.adapters.unload(number - 2)
        session.load(number, "12"[number % 2])
        session.settle()
        session.send(number, int("12"[number % 2]))
    session.check()
    assert adapters.num_columns <= columns + 64


def test_an_adapter_with_requests_is_unloaded_after_them_and_takes_no_more(running: Running) -> None:
    session = running.open()
    session.load(1, "1")
    session.settle()
    session.send(1, 1)
    session.core.adapters.unload(1)
    with pytest.raises(InvalidRequest, match="no longer serves the adapter"):
        session.send(1, 1)
    session.turn()
    assert session.core.executor._adapters.of_step.find_free(32).start > 0  # type: ignore[attr-defined]
    session.check()
    session.settle()
    assert session.core.executor._adapters.of_step.find_free(32).start == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_an_adapter_without_room_in_the_container_s_memory_fails(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    before = running.open(attention_backend=backend)
    before.load(1, "1")
    before.load(2, "2")
    before.settle()
    session = running.open(attention_backend=backend)
    session.load(1, "1")
    session.settle()
    monkeypatch.setattr(cgroup, "_CGROUP", tmp_path)
    old = bytes_of_matrices(session)  # one of them exists beside its replacement
    needed = session.core.executor._adapters.reserved_bytes + sum(bytes_of_matrices(before)) - sum(old) + max(old)  # type: ignore[attr-defined]
    (tmp_path / "memory.current").write_text("0")
    (tmp_path / "memory.max").write_text(f"{needed - 1}")
    session.load(2, "2")
    assert session.settle() == [AdapterLoaded(2)], "it may take the place of the first one"
    lost = session.send(2, 2)
    session.num_loading += 1
    (failed,) = session.settle()
    assert session.sent.pop(lost)
    assert session.outputs[lost][-1].finish_reason is FinishReason.ERROR
    assert isinstance(failed, AdapterFailed)
    assert failed.reason is FailureReason.OUT_OF_MEMORY
    assert failed.message.startswith("the adapter 'a2' cannot be used: ")
    session.send(1, 1)
    session.check()
    (tmp_path / "memory.max").write_text(f"{2 * needed}")
    session.load(3, "2")
    assert session.settle() == [AdapterLoaded(3)]
    session.send(1, 1)
    session.send(3, 2)
    session.check()


def bytes_of_matrices(session: Session) -> list[int]:
    """Return the bytes of all adapters' matrices in each layer that has some."""
    layers = [each for each in session.core.executor.model.modules() if isinstance(each, AdaptedLinear)]  # type: ignore[attr-defined]
    of_layers = (
        [each.weights._down.data, *(up.data for up in each.weights._ups)]
        if isinstance(each, NativeAdaptedLinear)
        else [each._down, *each._ups]
        for each in layers
    )
    return [sum(tensor.nbytes for tensor in tensors) for tensors in of_layers]


def test_an_adapter_that_cannot_be_used_fails_alone(running: Running, tmp_path: Path) -> None:
    session = running.open(attention_backend="auto")
    for name in ("dora", "huge", "nan"):
        save_adapter(running.ref.directory, tmp_path / name, 9)
    config = tmp_path / "dora" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_dora": True}))
    for name, number in (("huge", 3e38), ("nan", float("nan"))):
        file = tmp_path / name / "adapter_model.safetensors"
        tensors = load_file(file)
        last = [tensor for layer, tensor in sorted(tensors.items()) if "lora_A" in layer]
        for tensor in last if name == "huge" else last[-1:]:
            tensor.fill_(number)
        save_file(tensors, file)
    session.load(1, "1")
    for number, name in enumerate(("dora", "huge", "nan"), start=2):
        session.load(number, str(tmp_path / name))
    session.send(0, 0)
    loaded, *failed = session.settle()
    assert loaded == AdapterLoaded(1)
    assert [type(each) for each in failed] == [AdapterFailed] * 3
    found = [each.message for each in failed if isinstance(each, AdapterFailed)]
    assert all("the adapter 'a" in message for message in found)
    for message, expected in zip(found, ("'use_dora'", "with it, the model's results", "not finite in"), strict=True):
        assert expected in message
    session.send(1, 1)
    session.send(0, 0)
    session.check()
    assert not any(each[-1].finish_reason is FinishReason.ERROR for each in session.outputs.values())
