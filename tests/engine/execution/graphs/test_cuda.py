"""Checks that after a failed capture the engine computes every step without graphs, on each version of torch.

CUDA is simulated. The behaviour of torch's graphs and allocator in this case was read in their binaries.
"""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from tests.engine.references import Reference, answers

from conveyor_engine.execution import native
from conveyor_engine.execution.graphs.cuda import CudaCapture, Work
from conveyor_engine.execution.placement import open_placement
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.tasks.generate.execution import runner as generate
from conveyor_engine.tasks.generate.execution.runner import GenerateRunner

pytestmark = pytest.mark.skipif(
    native.why_missing() is not None, reason=f"needs the compiled kernels: {native.why_missing()}"
)
POOL = (0, 1)
SYNCHRONIZED = torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing", 900)
INVALIDATED = torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture", 901)


class PretendedCuda:
    """The parts of torch that a capture uses. Something waits for the stream in every capture."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, end_closes_pool: bool, work_raises: bool) -> None:
        self._end_closes_pool, self._work_raises = end_closes_pool, work_raises
        self.is_capturing = self.is_pool_open = False
        for name, fake in {
            "CUDAGraph": lambda: self,
            "Stream": lambda _: self,
            "current_stream": lambda _: self,
            "current_device": lambda: 0,
            "graph_pool_handle": lambda: POOL,
            "stream": lambda _: nullcontext(),
            "synchronize": lambda _: None,
            "empty_cache": self.empty_cache,
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end_pool)

    def wait_stream(self, _: object) -> None: ...

    def replay(self) -> None:
        pytest.fail("an invalid graph is replayed")

    def capture_begin(self, pool: tuple[int, int], capture_error_mode: str) -> None:
        assert not self.is_pool_open
        self.is_capturing = self.is_pool_open = True

    def during(self, work: Work) -> Work:
        def run() -> None:
            work()
            if self.is_capturing and self._work_raises:
                raise SYNCHRONIZED

        return run

    def capture_end(self) -> None:
        was_capturing, self.is_capturing = self.is_capturing, False
        if was_capturing and self._end_closes_pool:
            self.is_pool_open = False
        raise INVALIDATED

    def end_pool(self, device: int, pool: tuple[int, int]) -> None:
        assert (device, pool) == (0, POOL)
        if not self.is_pool_open:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.is_pool_open = False

    def empty_cache(self) -> None:
        if self.is_pool_open:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")


@pytest.mark.parametrize("work_raises", [False, True], ids=["invalidated", "raised in the work"])
@pytest.mark.parametrize("end_closes_pool", [False, True], ids=["torch 2.11", "torch 2.15"])
def test_a_capture_that_fails_leaves_an_engine_that_starts_without_graphs(
    reference: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch, end_closes_pool: bool, work_raises: bool
) -> None:
    ref = reference("llama")
    cuda = PretendedCuda(monkeypatch, end_closes_pool=end_closes_pool, work_raises=work_raises)
    capture = CudaCapture(torch.device("cuda"))
    monkeypatch.setattr(generate, "free_cached_memory", lambda _: torch.cuda.empty_cache())
    lines: list[str] = []
    config = ref.make_config(attention_backend="native", max_num_batched_tokens=200)
    runner = GenerateRunner(
        config, open_placement(config), lines.append, capture=lambda work: capture(cuda.during(work))
    )
    assert runner.graphs is not None
    assert runner.graphs.sizes("decodes") == runner.graphs.sizes("mixed") == []
    cause = SYNCHRONIZED if work_raises else INVALIDATED
    assert [line for line in lines if "cuda_graph_failed" in line and str(cause) in line], "the first error is logged"
    runner.free_memory()
    assert answers(EngineCore(config, runner), ref.prompts) == ref.answers


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this torch is built without CUDA")
def test_torch_has_the_call_that_closes_a_pool() -> None:
    """The function is private, and `torch.cuda.use_mem_pool` calls it too. With these arguments no pool is open."""
    with pytest.raises(RuntimeError):
        torch._C._cuda_endAllocateToPool(0, POOL)
