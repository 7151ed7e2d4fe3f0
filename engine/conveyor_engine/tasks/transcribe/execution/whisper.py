"""Runs Whisper's encoder on packed windows, and its decoder over the paged KV caches. Used by `runner`.

Both use transformers' weights, which are stacked and packed for the device's matrix products. In each layer's cache, a
row begins with the sound of its window: the keys and values of cross-attention, for each position of the encoder. The
keys and values of self-attention for the row's own tokens begin at the next whole block. So a layer needs only one
cache, and the scheduler counts blocks as for a text with a long prompt.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import gelu

from conveyor_engine.execution.attention.backend import AttentionBackend, AttentionMetadata, AttentionSpec, LayerShape
from conveyor_engine.execution.attention.interface import Paged
from conveyor_engine.execution.models.linear import Linear, build_linear
from conveyor_engine.tasks.transcribe.execution.alignment import Alignment


@dataclass(frozen=True, slots=True)
class _EncoderLayer:
    """One layer of transformers' encoder, with stacked weights."""

    attention: AttentionSpec
    before_attention: nn.Module
    qkv: Linear
    out: Linear
    before_mlp: nn.Module
    up: Linear
    activation: Any
    down: Linear


class Encoder:
    """The encoder of one model."""

    def __init__(self, model: Any, choose_attention: Callable[[list[int]], Paged]) -> None:
        """Move the encoder's layers out of `model`, so that each weight exists only once.

        model: transformers' WhisperForConditionalGeneration. choose_attention: returns attention over whole sequences,
        given the index where each begins and where the last one ends (`attention.packed`).
        """
        encoder = model.model.encoder
        self._convolutions, self._positions = (encoder.conv1, encoder.conv2), encoder.embed_positions.weight
        self._layer_norm, self._choose_attention = encoder.layer_norm, choose_attention
        self._head_size = int(model.config.d_model) // int(model.config.encoder_attention_heads)
        self._layers: list[_EncoderLayer] = []
        for number in range(len(encoder.layers)):
            self._layers.append(_stack_encoder(encoder.layers[number], number, self._head_size**-0.5))
            encoder.layers[number] = nn.Identity()

    def run(self, features: torch.Tensor) -> torch.Tensor:
        """Encode features (windows, mels, frames). Return hidden states (windows x positions, hidden)."""
        for convolution in self._convolutions:
            features = gelu(convolution(features))
        hidden = features.transpose(1, 2) + self._positions.to(features.dtype)
        windows, positions, _ = hidden.shape
        attention = self._choose_attention([number * positions for number in range(windows + 1)])
        hidden = hidden.flatten(0, 1)
        for layer in self._layers:
            stacked = layer.qkv(layer.before_attention(hidden))
            queries, keys, values = stacked.view(len(hidden), -1, self._head_size).chunk(3, dim=1)
            hidden = hidden + layer.out(attention.attend(layer.attention, queries, keys, values).flatten(1))
            hidden = hidden + layer.down(layer.activation(layer.up(layer.before_mlp(hidden))))
        normed: torch.Tensor = self._layer_norm(hidden)
        return normed


@dataclass(frozen=True, slots=True)
class _DecoderLayer:
    """One layer of transformers' decoder, with stacked weights. "Own" is self-attention, "sound" cross-attention."""

    own: AttentionSpec  # cross-attention uses it too
    before_own: nn.Module
    own_qkv: Linear
    own_out: Linear
    before_sound: nn.Module
    sound_q: Linear
    sound_kv: Linear
    sound_out: Linear
    before_mlp: nn.Module
    up: Linear
    activation: Any
    down: Linear


class Decoder:
    """The decoder of one model."""

    def __init__(self, model: Any, backend: AttentionBackend) -> None:
        """Move the decoder's layers out of `model`, so that each weight exists only once.

        model: transformers' WhisperForConditionalGeneration.
        """
        config, decoder = model.config, model.model.decoder
        self._backend = backend
        self._num_heads = int(config.decoder_attention_heads)
        self._head_size = int(config.d_model) // self._num_heads
        self._embed_scale = float(config.d_model) ** 0.5 if config.scale_embedding else 1.0
        self._embed_tokens, self._positions = decoder.embed_tokens, decoder.embed_positions.weight
        self._layer_norm, self._head = decoder.layer_norm, model.proj_out
        self._layers: list[_DecoderLayer] = []
        for number in range(len(decoder.layers)):
            self._layers.append(_stack_decoder(decoder.layers[number], number, self._head_size**-0.5))
            decoder.layers[number] = nn.Identity()

    @property
    def shapes(self) -> list[LayerShape]:
        """The numbers of heads and the head sizes of each layer."""
        return [LayerShape(self._num_heads, self._num_heads, self._head_size, self._head_size)] * len(self._layers)

    def write_sound(
        self, encoded: torch.Tensor, metadata: AttentionMetadata, alignment: Alignment | None = None
    ) -> None:
        """Write the cross-attention keys and values of all layers to the caches, at the slots of `metadata`.

        encoded: the encoder's output (windows x positions, hidden). alignment: also gets the keys.
        """
        for layer in self._layers:
            keys, values = self._split(layer.sound_kv(encoded)).chunk(2, dim=1)
            self._backend.write_kv(layer.own.layer, keys, values, metadata)
            if alignment is not None:
                alignment.keep(layer.own.layer, keys.reshape(metadata.num_seqs, -1, *keys.shape[1:]))

    def run(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        own: AttentionMetadata,
        sound: AttentionMetadata,
        alignment: Alignment | None = None,
    ) -> torch.Tensor:
        """Return the hidden states (T, hidden) of tokens (T,) at positions (T,) of their transcripts.

        own: for self-attention; it begins after the sound. sound: for cross-attention; each token is a sequence with
        one query, which attends to all positions of its window. alignment: also gets the cross-attention queries.
        """
        hidden = self._embed_tokens(tokens) * self._embed_scale
        hidden = hidden + self._positions[positions].to(hidden.dtype)
        for layer in self._layers:
            queries, keys, values = self._split(layer.own_qkv(layer.before_own(hidden))).chunk(3, dim=1)
            self._backend.write_kv(layer.own.layer, keys, values, own)
            hidden = hidden + layer.own_out(self._backend.attend(layer.own, queries, own).flatten(1))
            queries = self._split(layer.sound_q(layer.before_sound(hidden)))
            if alignment is not None:
                alignment.attend(layer.own.layer, queries, layer.own.scaling)
            hidden = hidden + layer.sound_out(self._backend.attend(layer.own, queries, sound).flatten(1))
            hidden = hidden + layer.down(layer.activation(layer.up(layer.before_mlp(hidden))))
        normed: torch.Tensor = self._layer_norm(hidden)
        return normed

    def _split(self, states: torch.Tensor) -> torch.Tensor:
        """Return states (T, n x hidden) as (T, n x heads, head size)."""
        return states.view(len(states), -1, self._head_size)

    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the float32 logits (T, vocabulary) of hidden states (T, hidden)."""
        logits: torch.Tensor = self._head(hidden)
        return logits.float()


def _stack_encoder(layer: Any, number: int, scaling: float) -> _EncoderLayer:
    attention = layer.self_attn
    _add_bias(attention.k_proj)
    return _EncoderLayer(
        attention=AttentionSpec(number, scaling, sliding_window=None, softcap=None, causal=False),
        before_attention=layer.self_attn_layer_norm,
        qkv=build_linear([attention.q_proj, attention.k_proj, attention.v_proj]),
        out=build_linear([attention.out_proj]),
        before_mlp=layer.final_layer_norm,
        up=build_linear([layer.fc1]),
        activation=layer.activation_fn,
        down=build_linear([layer.fc2]),
    )


def _stack_decoder(layer: Any, number: int, scaling: float) -> _DecoderLayer:
    own, sound = layer.self_attn, layer.encoder_attn
    for attention in (own, sound):
        _add_bias(attention.k_proj)
    return _DecoderLayer(
        own=AttentionSpec(number, scaling, sliding_window=None, softcap=None),
        before_own=layer.self_attn_layer_norm,
        own_qkv=build_linear([own.q_proj, own.k_proj, own.v_proj]),
        own_out=build_linear([own.out_proj]),
        before_sound=layer.encoder_attn_layer_norm,
        sound_q=build_linear([sound.q_proj]),
        sound_kv=build_linear([sound.k_proj, sound.v_proj]),
        sound_out=build_linear([sound.out_proj]),
        before_mlp=layer.final_layer_norm,
        up=build_linear([layer.fc1]),
        activation=layer.activation_fn,
        down=build_linear([layer.fc2]),
    )


def _add_bias(linear: nn.Linear) -> None:
    """Add a bias of zeros if there is none. Whisper's key projections have no bias, but are stacked with others."""

    if linear.bias is None:
        linear.bias = nn.Parameter(linear.weight.new_zeros(linear.out_features), requires_grad=False)
