"""Steps of decodes alone, in a few sizes, over buffers that stay where they are: so CUDA graphs can replay them.

Used by `runners.generate` for steps in which every row computes one token and samples one. Such a step gets two numbers
for each row from the host, and gathers the rest on the device from `rows`. Where the sampler can, it chooses the tokens
in the same graph, and writes them into the rows. The step is padded to the next size with a
spare row, which is the last one; its token lies in a block that no request is given. The sizes are vLLM's and
nano-vllm's up to 256. Only `cuda_graph` knows what a graph is.
"""

import time
from bisect import bisect_left
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from conveyor_engine.execution.attention.backend import AttentionBackend, AttentionMetadata
from conveyor_engine.execution.attention.interface import Paged, PagedStep
from conveyor_engine.execution.cuda_graph import Capture, Work
from conveyor_engine.execution.rows import Rows
from conveyor_engine.execution.sampling.processor import Samples
from conveyor_engine.execution.sampling.sampler import Found, Sampler
from conveyor_engine.execution.transfer import copy_into
from conveyor_engine.wire.step import StepPlan

# input_ids (1, T), position_ids (1, T), which tokens get logits (0: all), attention -> logits (T, vocabulary)
Forward = Callable[[torch.Tensor, torch.Tensor, int, Paged], torch.Tensor]
_NO_LENGTHS = np.zeros(0, dtype=np.int32)  # a graph knows none: whoever asks for the longest gets an error


def batch_sizes(max_num_seqs: int) -> list[int]:
    """The sizes, ascending. A product of up to 16 rows costs what one of 16 does, and larger ones grow slowly."""
    sizes = [1, 2, 4, 8, *range(16, 257, 16), *range(320, max_num_seqs, 64)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def is_decode_only(plan: StepPlan) -> bool:
    """Whether every row computes one token and samples one."""
    return 0 < len(plan.rows) == plan.num_decodes == plan.num_logits.count(1)


class DecodeGraphs:
    """One captured step for each size."""

    def __init__(
        self,
        rows: Rows,
        backend: AttentionBackend,
        forward: Forward,
        sampler: Sampler | None = None,
        *,
        block_size: int,
        spare_block: int,
    ) -> None:
        """rows: with one more than the engine has, which is the padding's; so is `spare_block`.

        sampler: chooses tokens in the graph, which writes them into the rows. It knows the spare row too.
        """
        self._rows, self._backend, self._forward = rows, backend, forward
        self._block_size = block_size
        self._spare_row = len(rows.block_tables) - 1
        rows.block_tables[self._spare_row] = spare_block
        device = rows.block_tables.device
        self._inputs = torch.zeros(3 * self._spare_row, dtype=torch.int64, device=device)
        self._starts = np.arange(self._spare_row + 1, dtype=np.int32)
        self._device_starts = torch.arange(self._spare_row + 1, dtype=torch.int32, device=device)
        self._logits = torch.empty(0, device=device)
        self._sampler = sampler
        self._found = Found(
            torch.zeros(self._spare_row, device=device),
            torch.zeros(self._spare_row, dtype=torch.int64, device=device),
        )
        self._replays: dict[int, Work] = {}
        self.sizes: list[int] = []  # captured ones, ascending

    def capture(self, capture: Capture, progress: Callable[[str], None], largest: int | None = None) -> None:
        """Captures the largest first, whose memory the others then share. After one that fails there are no more.

        `largest`: rows beyond which steps are too rare for a graph.
        """
        started = time.monotonic()
        if self._sampler is not None:
            self._sampler.refresh()
        for size in reversed(batch_sizes(largest or self._spare_row)):
            self._fill([], [], size)
            try:
                self._replays[size] = capture(partial(self._compute, size))
            except Exception as error:  # no memory, or a model that asks the device for a number: it works without
                progress(f"event=cuda_graph_failed size={size} error={type(error).__name__}: {str(error)[:200]}")
                break
        self.sizes = sorted(self._replays)
        seconds = time.monotonic() - started
        progress(f"event=cuda_graphs_captured sizes={len(self.sizes)} seconds={seconds:.1f}")

    def run(self, plan: StepPlan) -> tuple[torch.Tensor, Samples, Found | None] | None:
        """Logits (rows, vocabulary), whose they are, and the tokens that were chosen and written, if a sampler did so.

        The next run overwrites them. None: no graph is so large.
        """
        number = len(plan.rows)
        index = bisect_left(self.sizes, number)
        if index == len(self.sizes):
            return None
        size = self.sizes[index]
        host, device = self._fill(plan.rows, plan.num_computed_tokens, size)
        if self._sampler is not None:
            self._sampler.refresh()
        self._replays[size]()
        samples = Samples(host[0, :number], host[2, :number], device[0, :number], device[2, :number])
        found = None if self._sampler is None else Found(self._found.best[:number], self._found.tokens[:number])
        return self._logits[:number], samples, found

    def _fill(self, rows: list[int], computed: list[int], size: int) -> tuple[np.ndarray, torch.Tensor]:
        """Writes rows, positions and the positions behind them (3, size), on the host and on the device."""
        host = np.zeros((3, size), dtype=np.int64)
        host[0] = self._spare_row
        host[0, : len(rows)], host[1, : len(rows)] = rows, computed
        host[2] = host[1] + 1
        device = self._inputs_of(size)
        copy_into(device, host)
        return host, device

    def _inputs_of(self, size: int) -> torch.Tensor:
        return self._inputs[: 3 * size].view(3, size)

    def _compute(self, size: int) -> None:
        """What is captured: reads the inputs and the rows, writes keys, values and logits."""
        rows, positions, ends = self._inputs_of(size)
        block_tables = self._rows.block_tables[rows]
        blocks = block_tables.gather(1, (positions // self._block_size)[:, None]).squeeze(1).long()
        metadata = AttentionMetadata(
            query_start_loc=self._device_starts[: size + 1],
            seq_lens=ends.int(),
            block_tables=block_tables,
            slot_mapping=blocks * self._block_size + positions % self._block_size,
            num_seqs=size,
            num_decodes=size,
            num_tokens=size,
            query_start_loc_host=self._starts[: size + 1],
            seq_lens_host=_NO_LENGTHS,
        )
        input_ids = self._rows.token_ids[rows, positions].long()
        logits = self._forward(input_ids[None], positions[None], 0, PagedStep(self._backend, metadata))
        if not self._logits.numel():
            self._logits = logits.new_empty((self._spare_row, logits.shape[1]))
        self._logits[:size].copy_(logits)
        if self._sampler is not None:
            found = self._sampler.choose(self._logits[:size], rows, ends)
            self._found.best[:size].copy_(found.best)
            self._found.tokens[:size].copy_(found.tokens)
            self._rows.append(rows, ends, found.tokens)
