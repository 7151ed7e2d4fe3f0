"""Attention of long prompts over a cache of latents, on CPUs: expands latents to keys and values again.

Called by `latent`. With absorbed products, each pair of a query and a key needs the sizes of latents, which are several
times those of heads. So where a sequence has many queries, it is less work to expand the latents of its context first,
as transformers does, and to attend over keys and values. The memory for them is bounded: a few heads take turns in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Protocol

import torch

from conveyor_engine.execution import native
from conveyor_engine.execution.attention.backend import AttentionMetadata, AttentionSpec
from conveyor_engine.execution.attention.cpu_native import CpuNative

FEWEST: Final = 64  # queries of a sequence; with fewer, the calls for it take longer than they save
_ROOM_BYTES: Final = 64 * 2**20  # of keys and values, if those of one head do not need more
_PIECE: Final = 2048  # tokens whose latents are expanded at once, whole blocks


class PerHead(Protocol):
    """A matrix for each head."""

    def run(self, x: torch.Tensor, y: torch.Tensor, first: int = 0) -> None:
        """Write the products of x (T, H, in) to y (T, H, out). The heads begin with number `first`."""
        ...


class Sizes(NamedTuple):
    """The numbers of a latent, of the part of a head's key that comes from it, of the rotary part, and of a value."""

    rank: int
    nope: int
    rotary: int
    value: int

    def is_less_work(self, queries: int, context: int) -> bool:
        """Return whether expanding needs fewer products than absorbing. context: tokens, the queries included."""
        pairs = queries * context - queries * (queries - 1) // 2
        of_pair = 2 * self.rank - self.nope - self.value
        return (context - queries) * self.rank * (self.nope + self.value) < pairs * of_pair

    def room_bytes(self, context: int, itemsize: int) -> int:
        """Return the memory for a prompt of so many tokens: of keys and values, and of those on their way there."""
        return 2 * max(_ROOM_BYTES, self.bytes_of_head(-(-context // native.BLOCK_SIZE), itemsize))

    def bytes_of_head(self, num_blocks: int, itemsize: int) -> int:
        """Return the memory for the keys and values of one head."""
        return num_blocks * native.kv_values_per_block(1, self.nope + self.rotary, self.value) * itemsize


class Prompt(NamedTuple):
    """A sequence of a step: its queries, from the first one to the one behind the last, and where its latents are."""

    first: int
    end: int
    context: int  # tokens in the cache
    table: torch.Tensor  # of the blocks with these tokens


@dataclass(frozen=True, slots=True)
class Division:
    """The sequences of a step for which latents are expanded, and the step without them."""

    long: Sequence[Prompt]
    others: torch.Tensor  # int64: the tokens of the other sequences
    step: AttentionMetadata  # of these tokens


def divide_step(metadata: AttentionMetadata, table: int, sizes: Sizes) -> Division | None:
    """Return the sequences of a step for which expanding is less work; None if there are none."""
    step = metadata.of_table(table)
    if Division not in step.kept:
        found = _divide(step, sizes) if step.ends is None else None
        if found is not None:
            found.step.others = (found.step,) * len(metadata.others)  # whatever the table of a layer
        step.kept[Division] = found
    division = step.kept[Division]
    assert division is None or isinstance(division, Division)
    return division


def _divide(step: AttentionMetadata, sizes: Sizes) -> Division | None:
    starts, lengths = step.query_start_loc_host.tolist(), step.seq_lens_host.tolist()
    long, rest, tokens = [], [], []
    for row, (first, end, context) in enumerate(zip(starts, starts[1:], lengths, strict=False)):
        if end - first >= FEWEST and sizes.is_less_work(end - first, context):
            table = step.block_tables[row, : -(-context // native.BLOCK_SIZE)]
            long.append(Prompt(first, end, context, table))
        else:
            rest.append(row)
            tokens.append(torch.arange(first, end))
    if not long:
        return None
    rows, others = torch.tensor(rest, dtype=torch.int64), torch.cat([torch.empty(0, dtype=torch.int64), *tokens])
    query_starts = torch.tensor([0, *map(len, tokens)]).cumsum(0).to(torch.int32)
    fewer = replace(
        step,
        query_start_loc=query_starts,
        seq_lens=step.seq_lens[rows],
        block_tables=step.block_tables[rows],
        slot_mapping=step.slot_mapping[others],
        num_seqs=len(rest),
        num_tokens=len(others),
        query_start_loc_host=query_starts.numpy(),
        seq_lens_host=step.seq_lens_host[rest],
        kept={},
    )
    return Division(long, others, fewer)


@dataclass(frozen=True, slots=True)
class Expander:
    """Attention of one layer for the long sequences of a step."""

    of_keys: PerHead
    of_values: PerHead
    sizes: Sizes

    def attend(self, spec: AttentionSpec, query: torch.Tensor, backend: CpuNative, prompt: Prompt) -> torch.Tensor:
        """Attend for one sequence: query (n, H, nope + rotary) -> (n, H, value). Its latents are in the cache."""
        count, num_blocks = query.shape[1], len(prompt.table)
        out = query.new_empty((len(query), count, self.sizes.value))
        each = max(1, min(count, _ROOM_BYTES // self.sizes.bytes_of_head(num_blocks, query.itemsize)))
        blocks = torch.arange(num_blocks, dtype=torch.int32)[None]
        starts, lengths = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, len(query)], [prompt.context]))
        for first in range(0, count, each):
            heads = slice(first, min(first + each, count))
            out[:, heads] = native.paged_attention(
                query[:, heads], self._expand(spec.layer, backend, prompt.table, heads, query.dtype), starts, lengths,
                blocks, value_dim=self.sizes.value, scaling=spec.scaling,
            )  # fmt: skip
        return out

    def _expand(
        self, layer: int, backend: CpuNative, table: torch.Tensor, heads: slice, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of these heads for the blocks of a table, one block behind the other."""
        rank, nope, rotary, value = self.sizes
        count = heads.stop - heads.start
        caches = native.kv_scratch(len(table), count, nope + rotary, value, dtype)
        for first in range(0, len(table), _PIECE // native.BLOCK_SIZE):
            latents = backend.read_latents(layer, table[first : first + _PIECE // native.BLOCK_SIZE])
            tokens = len(latents)
            keys = latents.new_empty((tokens, count, nope + rotary))
            values = latents.new_empty((tokens, count, value))
            of_heads = latents[:, None, :rank].expand(tokens, count, rank)
            self.of_keys.run(of_heads, keys[..., :nope], heads.start)
            keys[..., nope:] = latents[:, None, rank : rank + rotary]
            self.of_values.run(of_heads, values, heads.start)
            begin = first * native.BLOCK_SIZE
            native.kv_write(keys, values, torch.arange(begin, begin + tokens), caches)
        return caches
