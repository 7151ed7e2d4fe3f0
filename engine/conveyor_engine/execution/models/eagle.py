"""Builds the head of an EAGLE-3 checkpoint: one layer of Llama over three hidden states of the model.

Called by `tasks.generate`. The files are those of the EAGLE authors or of vLLM's speculators. The head is defined as in
vLLM. It may have embeddings of its own, and may guess only some of the model's tokens.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from conveyor_engine.errors import ConfigError, ModelError
from conveyor_engine.execution.models import checks
from conveyor_engine.execution.models.heads import NUM_UNUSED, load_head, read_tensors
from conveyor_engine.execution.models.loader import check_safetensors
from conveyor_engine.model_files import read_architectures, read_object

_EMBEDDINGS, _FC, _HEAD, _TOKENS = "embed_tokens.weight", "fc.weight", "lm_head.weight", "d2t"


class EagleLayer(LlamaDecoderLayer):  # type: ignore[misc]
    """A layer whose attention reads embeddings and hidden states side by side."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            old = self.self_attn.get_submodule(name)
            assert isinstance(old, nn.Linear)
            setattr(self.self_attn, name, nn.Linear(2 * old.in_features, old.out_features, old.bias is not None))
        self._adds_normed = bool(getattr(config, "norm_before_residual", False))

    def forward(self, hidden_states: torch.Tensor, **others: Any) -> torch.Tensor:
        """hidden_states: (1, T, 2 * H), embeddings first."""
        embedded, residual = hidden_states.chunk(2, dim=-1)
        normed = self.hidden_norm(residual)
        joined = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        attended, _ = self.self_attn(hidden_states=joined, **others)
        hidden_states = attended + (normed if self._adds_normed else residual)
        out: torch.Tensor = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return out


class EagleHead(LlamaForCausalLM):  # type: ignore[misc]
    """Guesses tokens from three hidden states of the model, or from its own one."""

    chains_normed = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.model.layers = nn.ModuleList([EagleLayer(config, 0)])
        self.fc = nn.Linear(3 * config.target_hidden_size, size, bias=False)
        self.lm_head = nn.Linear(size, config.num_guessed, bias=False)
        if config.num_embedded:
            self.model.embed_tokens = nn.Embedding(config.num_embedded, size)

    def forward(self, input_ids: torch.Tensor, hidden_states: torch.Tensor | None = None, **others: Any) -> Any:
        """Compute logits of the tokens that the head can guess.

        input_ids: (1, T), the tokens after those of the hidden states. hidden_states: (1, T, 3 * size of the model's)
        or the head's own (1, T, H); None in checks of the start.
        """
        embedded = self.get_input_embeddings()(input_ids)
        if hidden_states is None:
            hidden_states = embedded
        elif hidden_states.shape[-1] != embedded.shape[-1]:
            hidden_states = self.fc(hidden_states)
        return super().forward(inputs_embeds=torch.cat([embedded, hidden_states], dim=-1), **others)


def is_eagle(directory: Path) -> bool:
    """Return whether config.json is that of an EAGLE-3 checkpoint. Raises ModelError."""
    return any("eagle3" in name.lower() for name in read_architectures(directory))


def load_eagle(
    directory: Path, target: PreTrainedModel, vocab_size: int, dtype: torch.dtype
) -> tuple[PreTrainedModel, torch.Tensor, list[int]]:
    """Load the head for a model. Raises ConfigError if it belongs to another model, or ModelError.

    Returns the head, the model's token (n,) for each of its own, and the layers whose inputs it reads.
    """
    check_safetensors(directory)
    content, text = read_object(directory / "config.json"), target.config.get_text_config()
    tensors = {_strip(name): tensor for name, tensor in read_tensors(str(directory), text).items()}
    tensors |= _read_checked(directory, tensors)
    for name in (_EMBEDDINGS, _FC, _HEAD):
        if name in tensors and tensors[name].dim() != 2:
            raise ModelError(f"the head in {directory} has {name} of shape {list(tensors[name].shape)}, not a matrix")
    tokens = _read_tokens(directory, tensors)
    if (width := tensors[_FC].shape[1] if _FC in tensors else 0) != 3 * text.hidden_size:
        raise _refuse(f"it reads hidden states of {width // 3} numbers, and the model has {text.hidden_size}")
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise _refuse(f"it guesses token {int(tokens.max())}, and the model has {vocab_size} tokens")
    layers = _find_layers(content, text.num_hidden_layers)
    config = _make_config(directory, content)
    config.target_hidden_size, config.num_guessed = text.hidden_size, len(tokens)
    config.num_embedded = len(tensors[_EMBEDDINGS]) if _EMBEDDINGS in tensors else 0
    if 0 < config.num_embedded < vocab_size:
        raise _refuse(f"it has embeddings of {config.num_embedded} tokens, and the model has {vocab_size}")
    if not config.num_embedded and config.hidden_size != text.hidden_size:
        raise _refuse(f"it has no embeddings of its own, and {config.hidden_size} numbers for each of the model's")
    named = {name if name in (_HEAD, _FC) else f"model.{name}": each for name, each in tensors.items()}
    head = load_head(EagleHead, config, named, dtype, str(directory))
    return head, tokens, layers


def _strip(name: str) -> str:
    return name.removeprefix("model.").replace("midlayer.", "layers.0.")


def _read_checked(directory: Path, tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors whose shapes are checked. Raises ModelError.

    A quantized checkpoint has no shapes before its tensors are restored.
    """
    try:
        return {name: tensors[name][...] for name in (_EMBEDDINGS, _FC, _HEAD, _TOKENS) if name in tensors}
    except checks.TRANSFORMERS_ERRORS as error:
        checks.raise_if_of_device(error)
        raise ModelError(f"the head in {directory} cannot be read: {checks.on_one_line(error)}") from error


def _read_tokens(directory: Path, tensors: dict[str, Any]) -> torch.Tensor:
    """Return the model's token for each that the head guesses. Takes what is no weight of the head out of `tensors`."""
    tensors.pop("t2d", None)
    if _HEAD not in tensors:
        raise ModelError(f"the head in {directory} has no {_HEAD}")
    own = torch.arange(max(1, len(tensors[_HEAD])))
    if (offsets := tensors.pop(_TOKENS, None)) is None:
        return own
    if list(offsets.shape) != [len(own)]:
        raise ModelError(f"the head in {directory} has {len(own)} tokens and {_TOKENS} of shape {list(offsets.shape)}")
    found: torch.Tensor = own + offsets.long()
    return found


def _make_config(directory: Path, content: Mapping[str, Any]) -> LlamaConfig:
    """Return the configuration of the head's layer. Raises ModelError."""
    nested = content.get("transformer_layer_config")  # of vLLM's speculators
    is_speculator = isinstance(nested, dict)
    values: dict[str, Any] = {**nested} if isinstance(nested, dict) else {**content}
    values["norm_before_residual"] = content.get("norm_before_residual", is_speculator)
    if values.get("model_type", "llama") != "llama":
        raise ModelError(
            f"the head in {directory} has a layer of {values['model_type']}; this engine runs those of llama"
        )
    values |= {"num_hidden_layers": 1, "vocab_size": NUM_UNUSED, "tie_word_embeddings": False, "pad_token_id": None}
    for name in ("model_type", "architectures", "quantization_config", "layer_types"):
        values.pop(name, None)
    try:
        return LlamaConfig(**values)
    except checks.TRANSFORMERS_ERRORS as error:
        raise ModelError(f"{directory}/config.json cannot be used: {checks.on_one_line(error)}") from error


def _find_layers(content: Mapping[str, Any], num_layers: int) -> list[int]:
    """Return the layers whose inputs the head reads, as vLLM does: those that config.json names, or its defaults."""
    nested = content.get("eagle_config")
    named = content.get("eagle_aux_hidden_state_layer_ids")
    if named is None and isinstance(nested, dict):
        named = nested.get("eagle_aux_hidden_state_layer_ids")
    layers = [2, num_layers // 2, num_layers - 3] if named is None else named
    is_list = isinstance(layers, list) and len(layers) == 3
    if not (is_list and all(type(each) is int and 0 <= each < num_layers for each in layers)):
        raise _refuse(f"it reads the layers {layers}, and the model has {num_layers}")
    return layers


def _refuse(why: str) -> ConfigError:
    return ConfigError(f"`draft_model` is a head of another model: {why}")
