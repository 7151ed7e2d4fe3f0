"""Whisper's encoder and decoder on rows of a batch, with a cache whose size does not change. Used by `speech`.

The encoder is transformers' own. The decoder runs transformers' weights in our loop: its caches are allocated once for
a batch, rows have positions of their own, and rows that have ended leave the batch.
"""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


class Decoder:
    """The decoder of one model."""

    def __init__(self, model: Any) -> None:
        """`model`: transformers' WhisperForConditionalGeneration."""
        self._decoder, self._head = model.model.decoder, model.proj_out
        self._layers = list(self._decoder.layers)
        config = model.config
        self.num_layers, self.num_heads = len(self._layers), int(config.decoder_attention_heads)
        self.head_size = int(config.d_model) // self.num_heads
        self._scale = self.head_size**-0.5
        self._embed_scale = float(config.d_model) ** 0.5 if config.scale_embedding else 1.0

    def split(self, states: torch.Tensor) -> torch.Tensor:
        """(rows, length, hidden) -> (rows, heads, length, size of a head)."""
        return self._divide(states).transpose(1, 2)

    def _divide(self, states: torch.Tensor) -> torch.Tensor:
        return states.view(*states.shape[:-1], self.num_heads, self.head_size)

    def read_sound(self, encoded: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each layer's keys and values of the encoder's output (rows, positions, hidden)."""
        attentions = [layer.encoder_attn for layer in self._layers]
        return [
            (self.split(each.k_proj(encoded)).contiguous(), self.split(each.v_proj(encoded)).contiguous())
            for each in attentions
        ]

    def run(self, tokens: torch.Tensor, positions: torch.Tensor, cache: "Cache", length: int) -> torch.Tensor:
        """Compute tokens (rows, n) at positions (rows, n), which all are below `length`. Return (rows, n, hidden).

        Writes keys and values into the first rows of the cache. A token sees positions up to its own.
        """
        rows = len(tokens)
        hidden = self._decoder.embed_tokens(tokens) * self._embed_scale
        hidden = hidden + self._decoder.embed_positions.weight[positions].to(hidden.dtype)
        mask = (torch.arange(length, device=tokens.device) <= positions[:, :, None])[:, None]
        places = torch.arange(rows, device=tokens.device)[:, None], positions
        for number, layer in enumerate(self._layers):
            keys, values = cache.keys[number], cache.values[number]
            normed, attention = layer.self_attn_layer_norm(hidden), layer.self_attn
            keys[places] = self._divide(attention.k_proj(normed))
            values[places] = self._divide(attention.v_proj(normed))
            own_keys, own_values = (part[:rows, :length].transpose(1, 2) for part in (keys, values))
            hidden = hidden + self._attend(attention, normed, own_keys, own_values, mask)
            of_sound = cache.sound[number]
            normed, attention = layer.encoder_attn_layer_norm(hidden), layer.encoder_attn
            hidden = hidden + self._attend(attention, normed, of_sound[0][:rows], of_sound[1][:rows], None)
            hidden = hidden + layer.fc2(layer.activation_fn(layer.fc1(layer.final_layer_norm(hidden))))
        normed_states: torch.Tensor = self._decoder.layer_norm(hidden)
        return normed_states

    def _attend(
        self, attention: Any, hidden: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        queries = self.split(attention.q_proj(hidden))
        mixed = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=self._scale)
        projected: torch.Tensor = attention.out_proj(mixed.transpose(1, 2).flatten(2))
        return projected

    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        """-> float32 logits (rows, vocabulary)."""
        logits: torch.Tensor = self._head(hidden)
        return logits.float()


class Cache:
    """Keys and values of the rows of one batch."""

    def __init__(
        self, decoder: Decoder, rows: int, length: int, sound: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """`length`: positions of each row. `sound`: each layer's keys and values of the encoder's output."""
        shape = (decoder.num_layers, rows, length, decoder.num_heads, decoder.head_size)
        like = sound[0][0]
        self.keys = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.values = torch.zeros_like(self.keys)
        self.sound, self.length = sound, length

    def move(self, source: int, target: int, length: int) -> None:
        """Give a row the place of another one, which has ended. `length`: the positions that the row has."""
        for part in (self.keys, self.values):
            part[:, target, :length] = part[:, source, :length]
        for keys, values in self.sound:
            keys[target], values[target] = keys[source], values[source]
