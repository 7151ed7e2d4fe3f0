"""Steps of a few sizes over buffers that stay where they are, so that CUDA graphs can replay them.

Used by `runners.generate`. There are two kinds of steps: `decodes`, and `mixed`, which also have prompts. A step is
padded to the next size with a spare row, which is the last one; its token lies in a block that no request is given.
Where the sampler can, it chooses the tokens in the same graph, and writes them into the rows. Only `cuda` knows what a
graph is.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from conveyor_engine.execution.attention.interface import Paged
from conveyor_engine.execution.graphs.cuda import Capture, Work
from conveyor_engine.execution.rows import Rows
from conveyor_engine.execution.sampling.processor import Samples
from conveyor_engine.execution.sampling.sampler import Found, Sampler
from conveyor_engine.wire.step import StepPlan

# input_ids (1, T), position_ids (1, T), which tokens get logits (R,) or 0 for all, attention -> (R, vocabulary)
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | int, Paged], torch.Tensor]


class StepKind(Protocol):
    """Steps that are computed alike, in several sizes."""

    name: str

    @property
    def sizes(self) -> Sequence[int]:
        """Those that are worth a graph, ascending."""
        ...

    def size_of(self, plan: StepPlan) -> int | None:
        """The least size that holds the plan's step; None if it is of another kind."""
        ...

    def fill(self, plan: StepPlan | None, size: int) -> Samples:
        """Writes the numbers of the plan's step and its padding, or of padding alone, to where `compute` reads them.

        Returns whose logits come first of those that `compute` makes; the padding's follow.
        """
        ...

    def compute(self, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What is captured: writes keys and values.

        Returns logits (n, vocabulary), and for each its row and the position of the next token, int64 (n,).
        """
        ...


class StepGraphs:
    """One captured step for each size of each kind."""

    def __init__(self, kinds: Sequence[StepKind], rows: Rows, sampler: Sampler | None = None) -> None:
        """rows: with one more than the engine has, which is the padding's.

        sampler: chooses tokens in the graph, which writes them into the rows. It knows the spare row too.
        """
        self._kinds, self._rows, self._sampler = kinds, rows, sampler
        num_rows, device = len(rows.block_tables) - 1, rows.block_tables.device
        self._logits = torch.empty(0, device=device)
        self._found = Found(
            torch.zeros(num_rows, device=device), torch.zeros(num_rows, dtype=torch.int64, device=device)
        )
        self._replays: dict[str, dict[int, Work]] = {kind.name: {} for kind in kinds}

    def sizes(self, name: str) -> list[int]:
        """The captured ones of a kind, ascending."""
        return sorted(self._replays.get(name, ()))

    def capture(self, capture: Capture, progress: Callable[[str], None]) -> None:
        """Captures the largest first, whose memory the others then share."""
        if self._sampler is not None:
            self._sampler.refresh()
        for kind in sorted(self._kinds, key=lambda kind: -max(kind.sizes, default=0)):
            self._capture_kind(kind, capture, progress)

    def _capture_kind(self, kind: StepKind, capture: Capture, progress: Callable[[str], None]) -> None:
        """After one that fails there are no more."""
        started = time.monotonic()
        replays = self._replays[kind.name]
        for size in reversed(kind.sizes):
            kind.fill(None, size)
            try:
                replays[size] = capture(partial(self._compute, kind, size))
            except Exception as error:  # no memory, or a model that asks the device for a number: it works without
                why = f"{type(error).__name__}: {str(error)[:200]}"
                progress(f"event=cuda_graph_failed steps={kind.name} size={size} error={why}")
                break
        seconds = time.monotonic() - started
        progress(f"event=cuda_graphs_captured steps={kind.name} sizes={len(replays)} seconds={seconds:.1f}")

    def run(self, plan: StepPlan) -> tuple[torch.Tensor, Samples, Found | None] | None:
        """Logits (entries, vocabulary), whose they are, and the tokens that were chosen and written, if a sampler did.

        The next run overwrites them. None: there is no graph for this step.
        """
        for kind in self._kinds:
            if (least := kind.size_of(plan)) is None:
                continue
            sizes = self.sizes(kind.name)
            index = bisect_left(sizes, least)
            if index < len(sizes):
                return self._replay(kind, plan, sizes[index])
        return None

    def _replay(self, kind: StepKind, plan: StepPlan, size: int) -> tuple[torch.Tensor, Samples, Found | None]:
        samples = kind.fill(plan, size)
        if self._sampler is not None:
            self._sampler.refresh()
        self._replays[kind.name][size]()
        number = len(samples.rows)
        found = None if self._sampler is None else Found(self._found.best[:number], self._found.tokens[:number])
        return self._logits[:number], samples, found

    def _compute(self, kind: StepKind, size: int) -> None:
        """What is captured, to the end."""
        logits, rows, ends = kind.compute(size)
        number = len(rows)
        if not self._logits.numel():
            self._logits = logits.new_empty((len(self._found.best), logits.shape[1]))
        self._logits[:number].copy_(logits)
        if self._sampler is not None:
            found = self._sampler.choose(self._logits[:number], rows, ends)
            self._found.best[:number].copy_(found.best)
            self._found.tokens[:number].copy_(found.tokens)
            self._rows.append(rows, ends, found.tokens)
