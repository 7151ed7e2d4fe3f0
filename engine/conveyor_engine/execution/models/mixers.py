"""Runs transformers' token mixers that keep a state for each row: gated delta nets, Mamba-2, short convolutions.

`loader` calls `carry_states` once. A mixer then computes each sequence of a step by itself, with the states of the row
(`states`): all decodes in one call, and each chunk of a prompt in a call of its own. The mixer keeps transformers' code
and names.
"""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from conveyor_engine.execution.attention.interface import Paged, PagedStep, Probe
from conveyor_engine.execution.models.adapters import Adapters
from conveyor_engine.execution.state_rows import StateRows
from conveyor_engine.execution.states import StepStates

_CACHES = ("cache_params", "past_key_values")  # the names of a mixer's argument for its states
# Arguments that are about a batch with padding, or about transformers' own cache.
_REPLACED = frozenset(
    {*_CACHES, "attention_mask", "cache_position", "position_ids", "position_embeddings", "use_cache"}
)


def carry_states(model: nn.Module) -> bool:
    """Make every mixer with a state read and write the states of a step's rows. Return whether there is one."""
    found = False
    for module in model.modules():
        if hasattr(module, "layer_idx") and any(isinstance(part, nn.Conv1d) for part in module.children()):
            names = inspect.signature(module.forward).parameters
            if name := next((name for name in _CACHES if name in names), None):
                module.forward = MixerForward(module.forward, name)
                found = True
    return found


def reads_lengths(model: nn.Module) -> bool:
    """Return whether a mixer runs transformers' code, for which the host must know the length of each sequence."""
    return any(isinstance(module.forward, MixerForward) for module in model.modules())


class MixerForward:
    """The forward of a mixer over the packed tokens of a step: hidden states (1, T, H) -> (1, T, H)."""

    def __init__(self, forward: Callable[..., torch.Tensor], cache: str) -> None:
        self._forward, self._cache = forward, cache
        self.adapters: Adapters | None = None  # of its linear layers; set by `adapt`

    def __call__(self, hidden_states: torch.Tensor, *_: Any, paged: Paged | None = None, **others: Any) -> torch.Tensor:
        kept = {name: value for name, value in others.items() if name not in _REPLACED}
        if not isinstance(paged, PagedStep):
            probe = paged.states if isinstance(paged, Probe) else None
            return self._forward(hidden_states, **{self._cache: probe}, **kept)
        assert paged.states is not None
        metadata, out = paged.metadata, []
        step = find_rows(paged)
        starts, decodes = metadata.query_start_loc_host.tolist(), metadata.num_decodes
        parts = [(0, decodes, hidden_states[0, :decodes, None])] if decodes else []
        for row in range(decodes, metadata.num_seqs):
            parts.append((row, row + 1, hidden_states[:, starts[row] : starts[row + 1]]))
        for begin, end, hidden in parts:
            states = StepStates(paged.states, step.rows[begin:end], step.is_new[begin:end])
            with nullcontext() if self.adapters is None else self.adapters.narrow(starts[begin], starts[end]):
                out.append(self._forward(hidden, **{self._cache: states}, **kept).flatten(0, 1))
            states.write_back()
        padding = hidden_states.shape[1] - metadata.num_tokens
        return torch.cat([*out, hidden_states.new_zeros(padding, out[0].shape[-1])])[None]


def find_rows(paged: PagedStep) -> StateRows:
    """Return the sequences of the step. Kept for the step."""
    metadata, token_rows = paged.metadata, paged.token_rows
    kept = metadata.kept.get(find_rows)
    if kept is None:
        assert token_rows is not None
        starts, host = metadata.query_start_loc, metadata.query_start_loc_host
        first = starts[:-1].long().clamp_max(len(token_rows) - 1)  # a sequence without tokens may begin after the last
        kept = metadata.kept[find_rows] = StateRows(
            starts,
            token_rows[first],
            metadata.seq_lens == starts.diff(),
            metadata.num_decodes,
            int(host[-1] - host[metadata.num_decodes]),
            metadata.num_tokens,
        )
    assert isinstance(kept, StateRows)
    return kept
