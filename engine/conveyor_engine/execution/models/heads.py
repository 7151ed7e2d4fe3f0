"""Builds the head of a model that guesses its next tokens, as a model of one decoder layer. Used by `tasks.generate`.

Such a head reads the hidden state of each token together with the embedding of the token after it. Multi-token
prediction is in the model's own files: as one more layer (DeepSeek-V3, GLM-4.5), or under `mtp.` (Qwen3-Next, Qwen3.5).
transformers leaves these weights out, so the head is defined here as in vLLM. The decoder layer is transformers'.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from conveyor_engine.errors import ConfigError, ModelError
from conveyor_engine.execution.attention import interface
from conveyor_engine.execution.models import checks
from conveyor_engine.execution.models.kinds import CAUSAL_LM
from conveyor_engine.execution.models.quantized.checkpoint import Checkpoint
from conveyor_engine.execution.models.quantized.stored import read_stored

NUM_UNUSED: Final = 256  # tokens of embeddings that the head gets from the model once it is loaded
_SHARED: Final = frozenset({"model.embed_tokens.weight", "lm_head.weight"})


class _Layout(NamedTuple):
    """How files name the parts of a head. Names that no rule begins are dropped."""

    rules: tuple[tuple[str, str], ...]  # beginning in the files, beginning in the head
    chains_normed: bool  # whether the head's own hidden state is the one after its last norm
    masks_first: bool  # whether the embedding that the first token reads is zero


_ONE_MORE_LAYER: Final = _Layout(
    (
        *((name, name) for name in ("enorm.", "hnorm.", "eh_proj.")),
        ("shared_head.norm.", "model.norm."),
        *((name, f"model.layers.0.{name}") for name in ("self_attn.", "mlp.", "input_layernorm.", "post_")),
    ),
    chains_normed=False,
    masks_first=True,
)
_MTP: Final = _Layout(
    (
        ("fc.", "eh_proj."),
        ("pre_fc_norm_embedding.", "enorm."),
        ("pre_fc_norm_hidden.", "hnorm."),
        ("norm.", "model.norm."),
        ("layers.0.", "model.layers.0."),
    ),
    chains_normed=True,
    masks_first=False,
)


def load_own_head(path: str, config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Load the model's own head, with unused embeddings. Raises ConfigError if the files have none, or ModelError."""
    text = config.get_text_config()
    tensors = read_tensors(path, config)
    found = _find(tensors, f"layers.{text.num_hidden_layers}.", "eh_proj.weight"), _find(tensors, "mtp.", "fc.weight")
    layout, prefix = (_ONE_MORE_LAYER, found[0]) if found[0] else (_MTP, found[1])
    if prefix is None:
        raise ConfigError(
            f"`speculation: mtp` is set, but the files in {path} have no head for it (layers.{text.num_hidden_layers}."
            "eh_proj or mtp.fc); use another method"
        )
    base = CAUSAL_LM.classes.get(type(text), None)
    if base is None:
        raise ModelError(f"{text.model_type} has no {CAUSAL_LM.name} in transformers, so its head cannot be computed")
    head = load_head(_class_for(base, layout), _config_for(text), dict(_rename(tensors, prefix, layout)), dtype, path)
    return head.to(device)


def build_own_head(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel | None:
    """Return the head that config.json declares, on torch's current device; None if it declares none."""
    text = config.get_text_config()
    layout = _ONE_MORE_LAYER if getattr(text, "num_nextn_predict_layers", None) else None
    layout = layout or (_MTP if getattr(text, "mtp_num_hidden_layers", None) else None)
    base = CAUSAL_LM.classes.get(type(text), None)
    if layout is None or base is None:
        return None
    how = {"attn_implementation": interface.IMPLEMENTATION, "dtype": dtype}
    head: PreTrainedModel = _class_for(base, layout)._from_config(_config_for(text), **how).eval()
    return head


def count_own_weights(head: PreTrainedModel) -> int:
    """Return the number of the head's weights, without the embeddings that it gets from the model."""
    return sum(each.numel() for name, each in head.named_parameters() if name not in _SHARED)


def read_tensors(path: str, config: PretrainedConfig) -> Mapping[str, Any]:
    """Return the weights in a directory by name, which `[...]` reads. Raises ModelError."""
    checkpoint = Checkpoint(Path(path), vllm_serves=True, restores=True)
    checkpoint.check_stored()
    restoring = checkpoint.restore(config)
    return restoring.tensors if restoring else {each.name: each for each in read_stored(Path(path), None)}


def load_head(
    head_class: Any, config: PretrainedConfig, tensors: Mapping[str, Any], dtype: torch.dtype, path: str
) -> PreTrainedModel:
    """Load a head from these tensors. Embeddings may be missing, nothing else. Raises ModelError."""
    interface.register()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    how = {"dtype": dtype, "attn_implementation": interface.IMPLEMENTATION, "output_loading_info": True}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"transformers\..*")
            head: PreTrainedModel
            head, info = head_class.from_pretrained(None, config=config, state_dict=dict(tensors), **how)
    except checks.TRANSFORMERS_ERRORS as error:
        checks.raise_if_of_device(error)
        raise ModelError(f"the head in {path} cannot be loaded: {checks.on_one_line(error)}") from error
    missing = set(info["missing_keys"]) - _SHARED
    checks.check_weights(path, info | {"missing_keys": missing})
    if left := sorted(map(str, info["unexpected_keys"])):
        raise ModelError(f"the head in {path} has {left[0]}, which this engine does not compute")
    return head.eval().requires_grad_(False)


def _find(tensors: Mapping[str, Any], folder: str, name: str) -> str | None:
    """Return the prefix of the head's names: what ends with `folder` before `name`."""
    found = (each.removesuffix(name) for each in tensors if each.endswith(folder + name))
    return next((each for each in found if each == folder or each.endswith("." + folder)), None)


def _rename(tensors: Mapping[str, Any], prefix: str, layout: _Layout) -> Iterator[tuple[str, Any]]:
    for name, tensor in tensors.items():
        rest = name.removeprefix(prefix)
        if rest != name:
            rule = next(((old, new) for old, new in layout.rules if rest.startswith(old)), None)
            if rule is not None:
                yield rule[1] + rest.removeprefix(rule[0]), tensor


def _config_for(text: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of a model whose only layer is like the model's last one, with full attention."""
    config = deepcopy(text)
    config.num_hidden_layers, config.vocab_size, config.tie_word_embeddings = 1, NUM_UNUSED, False
    config.pad_token_id = None
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"]
    if getattr(config, "mlp_layer_types", None):
        config.mlp_layer_types = config.mlp_layer_types[-1:]
    if getattr(config, "first_k_dense_replace", None):
        config.first_k_dense_replace = 0
    return config


def _class_for(base: type[PreTrainedModel], layout: _Layout) -> type[PreTrainedModel]:
    """Return a class that computes `base` over the joined hidden states and embeddings."""

    class Head(base):  # type: ignore[misc]
        chains_normed = layout.chains_normed

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            size, norm = config.hidden_size, type(self.model.norm)
            self.enorm, self.hnorm = (norm(size, eps=config.rms_norm_eps) for _ in range(2))
            self.eh_proj = nn.Linear(2 * size, size, bias=False)

        def forward(
            self,
            input_ids: torch.Tensor,
            position_ids: torch.Tensor,
            hidden_states: torch.Tensor | None = None,
            **others: Any,
        ) -> Any:
            """Compute logits of the tokens after `input_ids` (1, T), the tokens after those of the hidden states.

            hidden_states: (1, T, H); None in checks of the start.
            """
            embedded = self.get_input_embeddings()(input_ids)
            if hidden_states is None:
                hidden_states = embedded
            if layout.masks_first:
                embedded = embedded.masked_fill((position_ids == 0)[..., None], 0)
            joined = torch.cat([self.enorm(embedded), self.hnorm(hidden_states)], dim=-1)
            return super().forward(inputs_embeds=self.eh_proj(joined), position_ids=position_ids, **others)

    Head.__name__ = base.__name__
    return Head
