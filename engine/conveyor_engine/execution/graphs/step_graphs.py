"""Runs steps as captured CUDA graphs of a few sizes, over buffers that stay at the same address.

Used by `tasks.generate`. There are two kinds of steps: `decodes`, and `mixed`, which also have prompts. A step is
padded to the next captured size. Padding tokens belong to a spare row, the last one; its block belongs to no request.
If the sampler supports it, the same graph also samples the tokens and writes them into the rows. Only `cuda` depends on
CUDA graphs.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from conveyor_engine.errors import is_out_of_memory
from conveyor_engine.execution.attention.interface import Paged
from conveyor_engine.execution.graphs.cuda import Capture, Work
from conveyor_engine.execution.rows import Rows
from conveyor_engine.execution.sampling.processor import Samples
from conveyor_engine.execution.sampling.sampler import Found, Sampler
from conveyor_engine.wire.step import StepPlan

# (input_ids (1, T), position_ids (1, T), indices of tokens with logits (R,) or 0 for all, attention) -> (R, vocabulary)
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | int, Paged], torch.Tensor]


class StepKind(Protocol):
    """Steps that the same code computes, in several sizes."""

    name: str

    @property
    def sizes(self) -> Sequence[int]:
        """Return the sizes that are worth a graph, ascending."""
        ...

    def size_of(self, plan: StepPlan) -> int | None:
        """Return the least size that holds the plan's step; None if the step is of another kind."""
        ...

    def fill(self, plan: StepPlan | None, size: int) -> Samples:
        """Write the inputs of the plan's step, padded to `size`, to where `compute` reads them.

        Without a plan, writes only padding.

        Returns the rows and positions to which the first logits of `compute` belong. The padding's logits follow.
        """
        ...

    def compute(self, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute the step, which writes keys and values. A graph captures this computation.

        Returns logits (n, vocabulary), and for each of them its row and the position of the next token, int64 (n,).
        """
        ...


class StepGraphs:
    """One captured step for each size of each kind."""

    def __init__(self, kinds: Sequence[StepKind], rows: Rows, sampler: Sampler | None = None) -> None:
        """rows: the engine's rows and one spare row for padding.

        sampler: samples tokens within the graph, which writes them into the rows. The sampler must have the spare row
        too.
        """
        self._kinds, self._rows, self._sampler = kinds, rows, sampler
        num_rows, device = len(rows.block_tables) - 1, rows.block_tables.device
        self._logits = torch.empty(0, device=device)
        self._found = Found(
            torch.zeros(num_rows, device=device), torch.zeros(num_rows, dtype=torch.int64, device=device)
        )
        self._replays: dict[str, dict[int, Work]] = {kind.name: {} for kind in kinds}

    def sizes(self, name: str) -> list[int]:
        """Return the captured sizes of a kind of steps, ascending."""
        return sorted(self._replays.get(name, ()))

    @property
    def num_lost(self) -> int:
        """Return the number of sizes that are worth a graph and could not be captured."""
        return sum(len(kind.sizes) - len(self._replays[kind.name]) for kind in self._kinds)

    def capture(self, capture: Capture, progress: Callable[[str], None]) -> None:
        """Capture all sizes, the largest first, so that the others can share its memory."""
        if self._sampler is not None:
            self._sampler.refresh()
        for kind in sorted(self._kinds, key=lambda kind: -max(kind.sizes, default=0)):
            self._capture_kind(kind, capture, progress)

    def _capture_kind(self, kind: StepKind, capture: Capture, progress: Callable[[str], None]) -> None:
        """Capture the sizes of one kind, the largest first.

        A size without enough memory is left out, because a smaller one may have enough. Another error ends the captures
        of this kind: it does not depend on the size.
        """
        started = time.monotonic()
        replays = self._replays[kind.name]
        for size in reversed(kind.sizes):
            kind.fill(None, size)
            try:
                replays[size] = capture(partial(self._compute, kind, size))
            except Exception as error:  # no memory, or a model that waits for the device
                why = f"{type(error).__name__}: {str(error)[:200]}"
                progress(f"event=cuda_graph_failed steps={kind.name} size={size} error={why}")
                if not is_out_of_memory(error):
                    break
        seconds = time.monotonic() - started
        progress(f"event=cuda_graphs_captured steps={kind.name} sizes={len(replays)} seconds={seconds:.1f}")

    def run(self, plan: StepPlan) -> tuple[torch.Tensor, Samples, Found | None] | None:
        """Replay the graph for a step. Return None if there is none.

        Returns logits (entries, vocabulary), the row and position of each entry, and the tokens that the graph sampled
        and wrote into the rows (None without a sampler). The next run overwrites the results.
        """
        if self._sampler is not None and self._sampler.is_scored(plan):  # the graph would overwrite the prompt's tokens
            return None
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
        """Compute and sample a step. This is what a graph captures."""
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
