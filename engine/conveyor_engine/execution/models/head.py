"""Splits a classifier into its encoder, which runs packed, and its head, which then runs on few tokens.

`runners.classify` calls it once after loading. The head is transformers' own code: the model's forward, with the
encoder replaced by a module that returns given hidden states. This works in all model families, if the head reads only
the first token of a sequence, only the last token, their mean, or each token by itself. A trial run finds out which of
these the head reads, and rejects other heads.
"""

from collections.abc import Iterator
from random import Random
from typing import Final, Literal

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from conveyor_engine.errors import ModelError
from conveyor_engine.execution.attention import interface
from conveyor_engine.execution.models import checks
from conveyor_engine.execution.models.quantized.deferred import read_weights, stand_ins

Place = Literal["first", "last", "mean", "each"]  # the tokens of a sequence that a head reads

_LENGTHS: Final = (3, 5, 6, 8)
# Largest relative error of the logits over all prompts. The hidden states are equal, so only the head's own products
# round differently. Reading the wrong token gives an error of 0.5 or more.
_TOLERANCE_FLOAT32, _TOLERANCE_HALF = 1e-3, 0.1


class _Given(nn.Module):
    """Replaces the encoder: returns given hidden states, and the output of the encoder's pooler for them.

    A pooler is a layer over the first token. In some model families it is part of the encoder.
    """

    def __init__(self, pooler: nn.Module | None) -> None:
        super().__init__()
        self.pooler = pooler
        self.hidden: torch.Tensor | None = None

    def forward(self, *_: object, **__: object) -> BaseModelOutputWithPoolingAndCrossAttentions:
        pooled = None if self.pooler is None else self.pooler(self.hidden)
        return BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=self.hidden, pooler_output=pooled)


class Head:
    """Computes logits from an encoder's hidden states."""

    def __init__(self, model: PreTrainedModel, encoder: PreTrainedModel) -> None:
        """Replace the encoder in the model by a `_Given`."""
        self._given = _Given(getattr(encoder, "pooler", None))
        setattr(model, model.base_model_prefix, self._given)
        self._model = model
        text = model.config.get_text_config()
        if getattr(text, "pad_token_id", None) is None:
            text.pad_token_id = -1  # no token is padding; some heads reject batches if this is None
        self._token_id = int(text.pad_token_id == 0)  # any token except padding

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits, float32: hidden (sequences, tokens, H) -> (sequences, labels).

        If the model labels each token, the result is (sequences, tokens, labels).
        """
        self._given.hidden = hidden
        token_ids = torch.full(hidden.shape[:2], self._token_id, device=hidden.device)
        logits: torch.Tensor = self._model(input_ids=token_ids).logits
        self._given.hidden = None
        return logits.float()


def split_head(model: PreTrainedModel, *, per_token: bool) -> tuple[PreTrainedModel, Head, Place]:
    """Return the model's encoder, its head, and the tokens that the head reads.

    per_token: the model labels each token. Raises ModelError for a head that reads several tokens in another way.
    """
    places: tuple[Place, ...] = ("each",) if per_token else ("first", "last", "mean")
    with stand_ins():
        split = checks.run_once(f"the head of {type(model).__name__} cannot be run", lambda: _split(model, places))
    read_weights(model)  # which no longer has the encoder
    return split


def _split(model: PreTrainedModel, places: tuple[Place, ...]) -> tuple[PreTrainedModel, Head, Place]:
    name, encoder = type(model).__name__, model.base_model
    if encoder is model:
        raise ModelError(f"{name} has no encoder of its own: this engine cannot run it")
    has_interface = model._can_set_attn_implementation()
    if has_interface:
        interface.use_transformers_attention(model)
    expected, hidden = [], []
    for prompt in _make_prompts(model):
        expected.append(model(input_ids=prompt).logits.float())
        hidden.append(encoder(input_ids=prompt).last_hidden_state)
    if has_interface:
        model.set_attn_implementation(interface.IMPLEMENTATION)
    head = Head(model, encoder)
    tolerance = _TOLERANCE_FLOAT32 if hidden[0].dtype == torch.float32 else _TOLERANCE_HALF
    for place in places:
        if _is_same(expected, [head(select(states, place)) for states in hidden], tolerance):
            return encoder, head, place
    raise ModelError(f"{name} computes its logits from several tokens of a sequence: this engine cannot run it")


def select(hidden: torch.Tensor, place: Place) -> torch.Tensor:
    """Select the hidden states that the head reads: hidden (1, T, H) of one sequence -> (1, n, H)."""
    if place == "mean":
        return hidden.float().mean(dim=1, keepdim=True).to(hidden.dtype)
    return {"first": hidden[:, :1], "last": hidden[:, -1:], "each": hidden}[place]


def _make_prompts(model: PreTrainedModel) -> Iterator[torch.Tensor]:
    """Yield prompts (1, n) of random tokens without padding."""
    padding, random = getattr(model.config, "pad_token_id", None), Random(0)
    for length in _LENGTHS:
        token_ids: list[int] = []
        while len(token_ids) < length:
            token_id = random.randrange(model.get_input_embeddings().num_embeddings)
            token_ids += [token_id] * (token_id != padding)
        yield torch.tensor([token_ids], device=model.device)


def _is_same(expected: list[torch.Tensor], found: list[torch.Tensor], tolerance: float) -> bool:
    if any(one.shape != other.shape for one, other in zip(expected, found, strict=True)):
        return False
    one, other = (torch.cat([logits.flatten() for logits in each]) for each in (expected, found))
    return bool((one - other).norm() <= tolerance * one.norm())
