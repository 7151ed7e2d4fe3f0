"""Saves tiny heads beside tiny models, in the layouts of published files, and guesses with them as vLLM defines it.

The guesses are computed anew from a request's tokens: float32, transformers' layers, eager attention and no cache.
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.engine.tiny_models import VOCAB_SIZE, make_config, make_model
from torch import nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

Weights = dict[str, torch.Tensor]
ONE_MORE_LAYER = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
OF_QWEN = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


class HeadReference:
    """A head of the model's own, saved into its directory."""

    def __init__(self, kind: str, directory: Path, target: PreTrainedModel) -> None:
        self.target, self.is_qwen = target, kind in OF_QWEN
        text = target.config.get_text_config()
        rope = {"rope_parameters": text.rope_parameters} if kind in OF_QWEN else {}
        config = make_config(kind, num_hidden_layers=1, vocab_size=VOCAB_SIZE, **_one_layer(kind), **rope)
        torch.manual_seed(3)
        self.inner = make_model(kind, config, "eager")
        for parameter in self.inner.parameters():  # so that no two norms are alike
            if parameter.dim() == 1:
                parameter.data += 0.3 * torch.randn_like(parameter)
        size = config.hidden_size
        names = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden") if self.is_qwen else ("eh_proj", "enorm", "hnorm")
        self.join, self.enorm, self.hnorm = torch.randn(size, 2 * size) * 0.2, torch.randn(size), torch.randn(size)
        own = {f"{name}.weight": each for name, each in zip(names, (self.join, self.enorm, self.hnorm), strict=True)}
        self.offset = 1.0 if self.is_qwen else 0.0  # added to the weights of norms
        add_weights(directory, _name(_layer_weights(self.inner) | own, kind, text.num_hidden_layers))
        self.inner.lm_head.weight = nn.Parameter(target.lm_head.weight.data)

    def guess(self, tokens: Sequence[int], number: int) -> list[int]:
        """Return the next `number` tokens after these, of which there are two or more."""
        with torch.inference_mode():
            states = self.target(input_ids=torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states[-1]
            made: list[int] = []
            for _ in range(number):
                following = torch.tensor([[*tokens[1:], *made]])
                embedded = self.target.get_input_embeddings()(following)
                if not self.is_qwen:
                    embedded[:, 0] = 0
                joined = torch.cat([self._norm(embedded, self.enorm), self._norm(states, self.hnorm)], dim=-1)
                normed, before = _run(self.inner, joined @ self.join.T)
                made.append(int(self.target.lm_head(normed[0, -1]).argmax()))
                states = torch.cat([states, (normed if self.is_qwen else before)[:, -1:]], dim=1)
        return made

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        eps = self.inner.config.rms_norm_eps
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (self.offset + weight)


def _run(inner: PreTrainedModel, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the hidden states after and before the last norm."""
    noted: list[torch.Tensor] = []
    hook = inner.model.norm.register_forward_pre_hook(lambda _, args: noted.append(args[0]))
    normed = inner.model(inputs_embeds=inputs, use_cache=False).last_hidden_state
    hook.remove()
    return normed, noted[0]


def _one_layer(kind: str) -> dict[str, Any]:
    if kind in OF_QWEN:
        return {"layer_types": ["full_attention"]}
    return {"mlp_layer_types": ["sparse"]} if kind == "glm4_moe_lite" else {"first_k_dense_replace": 0}


def _layer_weights(inner: PreTrainedModel) -> Weights:
    """Return the layer's weights and the last norm's as transformers saves them: each expert by itself."""
    with tempfile.TemporaryDirectory() as folder:
        inner.save_pretrained(folder)
        return {name: each for name, each in load_file(Path(folder) / "model.safetensors").items() if "." in name}


def _name(weights: Weights, kind: str, num_layers: int) -> Weights:
    """Name the weights as in published files."""
    named: Weights = {}
    for name, each in weights.items():
        rest = name.removeprefix("model.").removeprefix("layers.0.")
        if rest.startswith(("embed_tokens", "lm_head")):
            continue
        if kind in OF_QWEN:
            named[f"mtp.{name.removeprefix('model.')}"] = each
        else:
            named[f"model.layers.{num_layers}.{'shared_head.' * rest.startswith('norm.')}{rest}"] = each
    return named


def add_weights(directory: Path, more: Weights) -> None:
    path = directory / "model.safetensors"
    weights = load_file(path) | {name: each.clone().contiguous() for name, each in more.items()}
    save_file(weights, path, metadata={"format": "pt"})


@dataclass
class EagleReference:
    """An EAGLE-3 head, which guesses every second token only."""

    target: PreTrainedModel
    weights: Weights
    config: LlamaConfig
    layers: tuple[int, int, int]
    adds_normed: bool = False

    @classmethod
    def save(cls, directory: Path, target: PreTrainedModel, *, of_speculators: bool) -> "EagleReference":
        """Save a head for the model, in the authors' layout or in that of vLLM's speculators."""
        torch.manual_seed(5)
        size, wide = target.config.hidden_size, 64
        values: dict[str, Any] = {
            "hidden_size": size, "intermediate_size": wide, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 16, "num_hidden_layers": 1, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 64,
            "model_type": "llama",
        }  # fmt: skip
        layer = "layers.0." if of_speculators else "midlayer."
        shapes = {
            "fc": (size, 3 * size), "norm": (size,), "lm_head": (VOCAB_SIZE // 2, size),
            f"{layer}hidden_norm": (size,), f"{layer}input_layernorm": (size,),
            f"{layer}post_attention_layernorm": (size,), f"{layer}self_attn.q_proj": (64, 2 * size),
            f"{layer}self_attn.k_proj": (32, 2 * size), f"{layer}self_attn.v_proj": (32, 2 * size),
            f"{layer}self_attn.o_proj": (size, 64), f"{layer}mlp.gate_proj": (wide, size),
            f"{layer}mlp.up_proj": (wide, size), f"{layer}mlp.down_proj": (size, wide),
        }  # fmt: skip
        weights = {f"{name}.weight": torch.randn(shape) * 0.3 for name, shape in shapes.items()}
        weights["d2t"] = torch.arange(VOCAB_SIZE // 2)  # token n is the model's token 2 * n
        weights["t2d"] = torch.arange(VOCAB_SIZE) % 2 == 0
        content: dict[str, Any] = values | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 99}
        layers = (2, target.config.num_hidden_layers // 2, target.config.num_hidden_layers - 3)
        if of_speculators:
            weights["embed_tokens.weight"] = torch.randn(VOCAB_SIZE, size)
            layers = (0, 1, 2)
            content = {
                "architectures": ["Eagle3Speculator"],
                "transformer_layer_config": values,
                "eagle_aux_hidden_state_layer_ids": [*layers],
            }
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps(content))
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        return cls(target, weights, LlamaConfig(**values), layers, of_speculators)

    def guess(self, tokens: Sequence[int], number: int) -> list[int]:
        with torch.inference_mode():
            of_layers = self.target(input_ids=torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
            states = torch.cat([of_layers[each] for each in self.layers], dim=-1) @ self.weights["fc.weight"].T
            made: list[int] = []
            for _ in range(number):
                before = self._layer(torch.tensor([[*tokens[1:], *made]]), states)
                scores = self._norm(before[0, -1], "norm") @ self.weights["lm_head.weight"].T
                made.append(2 * int(scores.argmax()))
                states = torch.cat([states, before[:, -1:]], dim=1)
        return made

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = next(each for key, each in self.weights.items() if key.endswith(f"{name}.weight"))
        if name == "norm":
            weight = self.weights["norm.weight"]
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps) * weight

    def _layer(self, following: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        embed = self.weights.get("embed_tokens.weight", self.target.get_input_embeddings().weight)
        normed = self._norm(states, "hidden_norm")
        joined = torch.cat([self._norm(embed[following], "input_layernorm"), normed], dim=-1)
        residual = normed if self.adds_normed else states
        layer = LlamaDecoderLayer(self.config, 0)
        layer.self_attn.config._attn_implementation = "eager"
        parts = {
            key.split(".", 2 if key.startswith("layers") else 1)[-1]: each
            for key, each in self.weights.items()
            if "self_attn" in key or "mlp" in key
        }
        for name in ("q_proj", "k_proj", "v_proj"):
            num_out, num_in = parts[f"self_attn.{name}.weight"].shape
            setattr(layer.self_attn, name, nn.Linear(num_in, num_out, bias=False))
        layer.load_state_dict(parts, strict=False)
        positions = torch.arange(joined.shape[1])[None]
        mask = torch.full((joined.shape[1],) * 2, float("-inf")).triu(1)[None, None]
        rotation = LlamaRotaryEmbedding(self.config)(joined, positions)
        attended, _ = layer.self_attn(joined, position_embeddings=rotation, attention_mask=mask)
        hidden = residual + attended
        out: torch.Tensor = hidden + layer.mlp(self._norm(hidden, "post_attention_layernorm"))
        return out
