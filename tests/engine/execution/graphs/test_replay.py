"""Checks what a graph would contain of a step: all operations and launches on the capture's tensors, and nothing else.

They are recorded as a capture does, and replayed without the engine's code on buffers with other numbers. If Python had
read a number, or if the work used a tensor of another step, the tokens would differ. Kernels run in Triton's
interpreter.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.execution import interpreter
from tests.engine.references import add, run, tokens_of
from tests.engine.tiny_models import REJECTED, greedy, save_tiny_model
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from conveyor_engine import execution
from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.execution import native
from conveyor_engine.execution.attention.triton_backend import TritonPaged
from conveyor_engine.execution.graphs.cuda import Work
from conveyor_engine.execution.graphs.step_graphs import StepGraphs
from conveyor_engine.execution.kernels import paged_attention
from conveyor_engine.execution.placement import open_placement
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.tasks.generate.execution import runner as generate
from conveyor_engine.tasks.generate.execution.runner import GenerateRunner

pytestmark = pytest.mark.skipif(interpreter.HAVE_GPU, reason="a GPU has graphs of its own")
NEEDS_LFM2 = pytest.mark.skipif("lfm2" in REJECTED, reason="this transformers is too old for LFM2")
aten = torch.ops.aten
READS = {
    aten.item.default,
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.equal.default,
    aten.is_nonzero.default,
}


class Recording(TorchDispatchMode):
    """Records torch's operations and Triton's launches in order."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Work] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in READS, f"{func} waits for the device"
        call = partial(func, *args, **(kwargs or {}))
        out = call()
        self._calls.append(partial(_into, out, call))
        return out

    def launch(self, run_kernel: Callable[..., None]) -> None:
        with _disable_current_modes():
            run_kernel()
        self._calls.append(run_kernel)

    def replay(self) -> None:
        for call in self._calls:
            call()


def _into(out: Any, call: Callable[[], Any]) -> None:
    """Repeat a call and write its results into the tensors of the first call."""
    for old, new in zip(tree_leaves(out), tree_leaves(call()), strict=True):
        if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Callable[[Work], Work]:
    recordings: list[Recording] = []
    kernel = type(paged_attention._attend)
    run_kernel = kernel.run

    def launch(self: Any, *args: Any, **options: Any) -> None:
        call = partial(run_kernel, self, *args, **options)
        recordings[-1].launch(call) if recordings else call()

    monkeypatch.setattr(kernel, "run", launch)

    def record(work: Work) -> Work:
        work()
        recordings.append(Recording())
        with recordings[-1] as recording:
            work()
        recordings.clear()
        return recording.replay

    return record


def make_core(
    model: Path, monkeypatch: pytest.MonkeyPatch, capture: Callable[[Work], Work] | None
) -> tuple[EngineCore, GenerateRunner]:
    monkeypatch.setattr(execution.kernels, "why_missing", lambda device: None)
    monkeypatch.setattr(native, "why_missing", lambda: "not wanted")
    monkeypatch.setattr(generate, "select_backend", lambda *_: TritonPaged(num_processors=2))
    config = EngineConfig(
        model=str(model), device="cpu", dtype="float32", max_model_len=96, max_num_seqs=3,
        num_kv_blocks=32, max_num_batched_tokens=32, warmup=False,
    )  # fmt: skip
    runner = GenerateRunner(config, open_placement(config), capture=capture)
    return EngineCore(config, runner), runner


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@pytest.mark.parametrize(
    ("kind", "num_layers"),
    [
        ("llama", 2),
        pytest.param("lfm2", 3, marks=NEEDS_LFM2),
        ("nemotron_h", 3),
        ("qwen3_5_text", 3),
        pytest.param("gemma2", 3, marks=pytest.mark.nightly),
    ],
    ids=["llama", "lfm2", "nemotron_h", "qwen3_5_text", "gemma2"],
)
def test_a_recorded_step_replayed_over_other_numbers_gives_the_tokens_of_generate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capture: Callable[[Work], Work], kind: str, num_layers: int
) -> None:
    model = save_tiny_model(kind, tmp_path, num_hidden_layers=num_layers)
    core, runner = make_core(tmp_path, monkeypatch, capture)
    assert runner.graphs is not None
    assert runner.graphs.sizes("decodes") == [1, 2, 3], "every step could be recorded"
    assert runner.graphs.sizes("mixed") == [16, 32]
    monkeypatch.setattr(StepGraphs, "_compute", lambda *_: pytest.fail("the engine's code runs again"))
    monkeypatch.setattr(runner, "_launch", lambda _: pytest.fail("a step without a graph"))
    prompts = [[7, 3, 9, 4], [11] * 18, [*range(50, 55)]]
    for number, (prompt, max_tokens) in enumerate(zip(prompts, (5, 2, 3), strict=True)):
        add(core, str(number), prompt, max_tokens=max_tokens)
    outputs = run(core)
    for number, (prompt, max_tokens) in enumerate(zip(prompts, (5, 2, 3), strict=True)):
        assert tokens_of(outputs[str(number)]) == greedy(model, prompt, max_tokens)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_tokens_that_a_graph_chooses_are_those_chosen_outside_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capture: Callable[[Work], Work]
) -> None:
    """Run steps for which a graph chooses all tokens, some (cuts), and none (penalties), one after another."""
    save_tiny_model("llama", tmp_path, num_hidden_layers=1)
    requests: list[dict[str, Any]] = [
        {"max_tokens": 5, "temperature": 0.0},
        {"max_tokens": 3, "temperature": 1.5, "min_p": 0.01},
        {"max_tokens": 2, "temperature": 1.0, "top_p": 0.9},
        {"max_tokens": 2, "temperature": 1.2, "presence_penalty": 1.5},
        {"max_tokens": 2, "temperature": 0.0, "logprobs": 2},
    ]
    results = []
    for chosen_by in (capture, None):
        core, _ = make_core(tmp_path, monkeypatch, chosen_by)
        for number, params in enumerate(requests):
            add(core, str(number), [*range(3 + number, 9 + number)], ignore_eos=True, seed=number, **params)
        outputs = run(core)
        results.append([tokens_of(outputs[str(number)]) for number in range(len(requests))])
    assert results[0] == results[1]
