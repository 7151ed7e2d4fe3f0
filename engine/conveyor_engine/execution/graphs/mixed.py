"""Graphs for steps with prompts, and possibly decodes. Used by `step_graphs`.

A graph computes a fixed number of tokens, which can belong to any sequences. Its attention metadata has a fixed number
of entries, called places. The first half of the places is for decodes, the second half for prompts. Each half has a
place for every sequence that the tokens could belong to. On the device, an unused place is a sequence without tokens,
for which attention computes nothing. Unused tokens belong to the spare row and to no sequence.
"""

from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from conveyor_engine.execution.attention.backend import AttentionBackend
from conveyor_engine.execution.attention.interface import PagedStep
from conveyor_engine.execution.batch import lay_out, with_tables
from conveyor_engine.execution.graphs.step_graphs import Forward
from conveyor_engine.execution.rows import Rows
from conveyor_engine.execution.sampling.processor import Samples
from conveyor_engine.execution.states import States
from conveyor_engine.execution.transfer import copy_into
from conveyor_engine.wire.step import StepPlan

_MOST_TOKENS = 2048  # larger steps gain nothing: the host launches them faster than the GPU computes them
_NO_LENGTHS = np.zeros(0, dtype=np.int32)


def token_sizes(max_num_batched_tokens: int) -> list[int]:
    """Return the sizes, ascending.

    Up to 128 they are multiples of 16. Above 128, there are eight sizes from one power of two to the next, so that
    padding adds at most an eighth.
    """
    largest = min(max_num_batched_tokens, _MOST_TOKENS)
    powers = (128, 256, 512, 1024)
    sizes = [*range(16, 128, 16), *(size for power in powers for size in range(power, 2 * power, power // 8))]
    return [size for size in sizes if size < largest] + [largest]


class _Numbers(NamedTuple):
    """The host's inputs for a step of T tokens, as views of one int64 array, of numpy or of torch.

    S: number of places for decodes. The same number of places for prompts follows. A step has at most S logits.
    """

    token_rows: Any  # (T,)
    positions: Any  # (T,)
    rows: Any  # (2 S,)
    lengths: Any  # (2 S,): length of the context including this step's tokens; 0 for an unused place
    starts: Any  # (2 S + 1,): where the tokens of each place begin
    logit_indices: Any  # (S,)
    sampled_rows: Any  # (S,)
    ends: Any  # (S,): positions of the tokens to be sampled


def _split(numbers: Any, tokens: int, places: int) -> _Numbers:
    sizes = (tokens, tokens, 2 * places, 2 * places, 2 * places + 1, places, places, places)
    return _Numbers(*(numbers[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)))


class MixedSteps:
    """A `StepKind` whose sizes are numbers of tokens."""

    name = "mixed"

    def __init__(
        self,
        rows: Rows,
        backend: AttentionBackend,
        forward: Forward,
        max_num_batched_tokens: int,
        states: States | None = None,
    ) -> None:
        """rows: the last row is for padding. states: of all rows; None: the model has none."""
        self._rows, self._backend, self._forward, self._states = rows, backend, forward, states
        self._spare_row = len(rows.block_tables) - 1
        self.sizes = token_sizes(max_num_batched_tokens)
        numbers = self._count_numbers(self.sizes[-1])
        self._inputs = torch.zeros(numbers, dtype=torch.int64, device=rows.block_tables.device)

    def _count_places(self, size: int) -> int:
        return min(size, self._spare_row)

    def _count_numbers(self, size: int) -> int:
        return 2 * size + 9 * self._count_places(size) + 1

    def size_of(self, plan: StepPlan) -> int | None:
        return sum(plan.num_tokens) if plan.rows and max(plan.num_logits) <= 1 else None

    def fill(self, plan: StepPlan | None, size: int) -> Samples:
        places = self._count_places(size)
        numbers = np.zeros(self._count_numbers(size), dtype=np.int64)
        host = _split(numbers, size, places)
        for rows in (host.token_rows, host.rows, host.sampled_rows):
            rows[:] = self._spare_row
        host.ends[:] = 1
        count = 0 if plan is None else self._write(plan, host, places)
        device = self._inputs[: len(numbers)]
        copy_into(device, numbers)
        views = _split(device, size, places)
        return Samples(host.sampled_rows[:count], host.ends[:count], views.sampled_rows[:count], views.ends[:count])

    def _write(self, plan: StepPlan, host: _Numbers, places: int) -> int:
        """Write the plan's numbers. Return the number of logits."""
        layout = lay_out(plan)
        tokens, count, decodes = layout.num_tokens, len(layout.logit_indices), plan.num_decodes
        prompts = len(layout.rows) - decodes
        host.token_rows[:tokens], host.positions[:tokens] = layout.token_rows, layout.positions
        for place, of_plan in ((host.rows, layout.rows), (host.lengths, layout.seq_lens)):
            place[:decodes], place[places : places + prompts] = of_plan[:decodes], of_plan[decodes:]
        host.starts[:places] = np.minimum(np.arange(places), decodes)
        host.starts[places : places + prompts] = layout.starts[decodes:-1]
        host.starts[places + prompts :] = tokens
        host.logit_indices[:count] = layout.logit_indices
        host.sampled_rows[:count], host.ends[:count] = layout.sampled_rows, layout.ends
        return count

    def compute(self, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        places = self._count_places(size)
        step = _split(self._inputs[: self._count_numbers(size)], size, places)
        metadata = with_tables(
            self._rows.tables[:, step.rows],
            self._rows.find_slots(step.token_rows, step.positions),
            query_start_loc=step.starts.int(),
            seq_lens=step.lengths.int(),
            num_seqs=2 * places,
            num_decodes=places,
            num_tokens=0,  # unknown when the graph is captured, so attention must not rely on it
            query_start_loc_host=np.repeat(np.array([0, size], dtype=np.int32), (places + 1, places)),
            seq_lens_host=_NO_LENGTHS,
        )
        input_ids = self._rows.token_ids[step.token_rows, step.positions].long()
        paged = PagedStep(self._backend, metadata, token_rows=step.token_rows, states=self._states)
        logits = self._forward(input_ids[None], step.positions[None], step.logit_indices, paged)
        return logits, step.sampled_rows, step.ends
