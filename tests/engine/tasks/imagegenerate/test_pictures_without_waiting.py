"""Checks that a step of pictures is launched on a GPU without reading a number from it, with each scheduler.

A scheduler computes its factors on the host, with real numbers, so fake tensors do not suffice here. Instead, weights,
what is copied to the device and all that is computed from them are marked. Reading a number of a marked tensor raises.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.embedding_cores import make_core
from tests.engine.paint_layouts import PIPELINES, save_layout
from tests.engine.paint_models import BRIEFS, Pixels, add, distance, open_pipeline, paint, read_last
from tests.engine.tasks.imagegenerate.test_pictures import SCHEDULERS, Painter, run
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from conveyor_engine.execution.transfer import to_device
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.tasks.imagegenerate.execution import runner as of_runner
from conveyor_engine.tasks.imagegenerate.execution.families import flux, stable_diffusion_xl
from conveyor_engine.tasks.imagegenerate.execution.runner import PaintRunner

_READS = ("_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero", "masked_select", "unique_dim", "_unique2")


class _ReadError(Exception):
    """A number of the device was read."""


def mark(tensor: torch.Tensor) -> torch.Tensor:
    tensor.on_device = True  # type: ignore[attr-defined]
    return tensor


def find_tensors(values: object) -> Iterator[torch.Tensor]:
    return (each for each in tree_iter(values) if isinstance(each, torch.Tensor))


class Device(TorchDispatchMode):
    """Marks what is computed from marked tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_marked = any(getattr(each, "on_device", False) for each in find_tensors((args, kwargs or {})))
        if is_marked and func.overloadpacket.__name__ in _READS:
            raise _ReadError(str(func))
        result = func(*args, **(kwargs or {}))
        if is_marked:
            for each in find_tensors(result):
                mark(each)
        return result


def watch(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> PaintRunner:
    """Let every step of this engine begin on the pretended device."""
    runner = core.executor
    assert isinstance(runner, PaintRunner)
    parts = runner._family.parts
    for part in (parts.denoiser, parts.vae, *parts.text_encoders):
        for weight in (*part.parameters(), *part.buffers()):
            mark(weight)
    for module in (of_runner, flux, stable_diffusion_xl):
        monkeypatch.setattr(module, "to_device", lambda array, device: mark(to_device(array, device)))
    begin: Callable[..., Any] = runner.begin

    def begin_on_device(plan: Any) -> Any:
        with Device():
            return begin(plan)

    monkeypatch.setattr(runner, "begin", begin_on_device)
    return runner


def paint_two(core: EngineCore, directory: Path, pictures: list[Pixels]) -> None:
    """Make the first two pictures, of which the second joins a step later, and compare them."""
    add(core, directory, "0", BRIEFS[0])
    early = core.step(0.0)
    add(core, directory, "1", BRIEFS[1])
    outputs = run(core)
    assert not [output for output in early if output.finish_reason], "it takes several steps"
    made = [read_last(outputs[str(number)], BRIEFS[number]) for number in range(2)]
    assert distance(made, pictures[:2]) <= 1


@pytest.mark.parametrize(
    "scheduler",
    [pytest.param(s, marks=() if s.startswith("Euler") else pytest.mark.nightly) for s in SCHEDULERS],
)
def test_pictures_are_made_without_waiting(scheduler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    painter = Painter(tmp_path, scheduler, **SCHEDULERS[scheduler])
    core = painter.make_core(batching_mode="continuous")
    watch(core, monkeypatch)
    paint_two(core, painter.directory, painter.pictures)


@pytest.mark.parametrize("layout", PIPELINES)
def test_pictures_of_each_layout_are_made_without_waiting(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_layout(tmp_path, layout)
    core = make_core(tmp_path, batching_mode="continuous", max_num_batched_tokens=None, max_num_seqs=8)
    watch(core, monkeypatch)
    pipeline = open_pipeline(tmp_path)
    paint_two(core, tmp_path, [paint(pipeline, brief) for brief in BRIEFS[:2]])


def test_a_number_that_is_read_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    painter = Painter(tmp_path)
    core = painter.make_core(batching_mode="continuous")
    runner = watch(core, monkeypatch)
    read = []
    runner._family.parts.denoiser.register_forward_hook(lambda _, __, output: read.append(output[0].sum().item()))
    add(core, painter.directory, "0", BRIEFS[0])
    with pytest.raises(_ReadError, match="item"):
        run(core)
    assert not read
