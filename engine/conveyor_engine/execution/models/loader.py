"""Loads a model directory into one of transformers' own classes, which may then run on our attention (`ModelKind`).

Called by `start`. This module downloads nothing and runs no code from the checkpoint. `checks` rejects models that
would load but give wrong answers.
"""

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from conveyor_engine.errors import ModelError
from conveyor_engine.execution.attention import interface
from conveyor_engine.execution.models import checks
from conveyor_engine.execution.models.experts import find_clamps, is_gated
from conveyor_engine.execution.models.kinds import CAUSAL_LM, ModelKind
from conveyor_engine.execution.models.mixers import carry_states
from conveyor_engine.execution.models.packing import find_first_position
from conveyor_engine.execution.models.quantized.checkpoint import Checkpoint
from conveyor_engine.execution.models.quantized.deferred import loading, number_weights, read_weights
from conveyor_engine.execution.models.quantized.reading import Restoring
from conveyor_engine.execution.models.towers import put_back, take_towers


def load_config(path: str, kind: ModelKind = CAUSAL_LM) -> PretrainedConfig:
    """Return the configuration of the model in directory `path`. Raises ModelError, also for other kinds of models."""
    config = checks.read_config(Path(path), kind)
    _checkpoint(path, config, kind).check_stored()
    for each in (config, config.get_text_config()):
        if hasattr(each, "quantization_config"):  # transformers would restore the weights itself, not all of them right
            del each.quantization_config
    return config


def load_model(
    path: str,
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    kind: ModelKind = CAUSAL_LM,
    *,
    sees: bool = False,
    defers: bool = False,
) -> PreTrainedModel:
    """Load the model in evaluation mode onto `device`. All weights come from the checkpoint. Raises ModelError.

    sees: a model of images and texts keeps its encoders, with transformers' own attention. defers: the weights of a
    quantized checkpoint are read when they are packed: by `fuse`, or by `gpu_packing` on their way to a GPU.
    """
    check_safetensors(Path(path))
    if kind.own_attention:
        interface.register()
    found = (kind.second.of(config) if sees and kind.second else None) or kind.of(config) or kind
    checkpoint = _checkpoint(path, config, kind)
    restoring = checkpoint.restore(config, defers=defers)
    transformers_logging.set_verbosity_error()  # where it would warn, the checks below raise errors
    transformers_logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"transformers\..*")
            with loading():
                model, info = _read_weights(Path(path), config, dtype, found, restoring)
            towers = take_towers(model) if kind is CAUSAL_LM else []
            model = model.to(device).eval().requires_grad_(False)
    except checks.TRANSFORMERS_ERRORS as error:
        checks.raise_if_of_device(error)
        if restoring is not None and restoring.no_memory:
            raise restoring.no_memory from error
        if restoring is not None and restoring.failure:
            raise restoring.build_error() from error
        raise ModelError(f"the model in {path} cannot be loaded: {checks.on_one_line(error)}") from error
    checkpoint.check_loaded(model, info, restoring)
    number_weights(model, model.get_output_embeddings(), _is_packed)
    if kind.without_pooler:
        _drop_pooler(model, info)
    if kind.own_attention and model._can_set_attn_implementation():
        _number_attentions(model)
    has_states = kind.own_attention and carry_states(model)
    checks.check_weights(path, info)
    if found is not kind and not has_states:  # `state_trial` checks the others
        _check_text(model)
    if sees:
        put_back(model, towers)
        for tower in towers:
            read_weights(tower.part)
            interface.use_transformers_attention(tower.part.to(device).eval().requires_grad_(False))
    return model


def _is_packed(part: nn.Module) -> bool:
    """Return whether the weights of such modules are packed, one module after another."""
    return type(part) in (nn.Linear, nn.Embedding) or is_gated(part) or find_clamps(part) is not None


def _check_text(model: PreTrainedModel) -> None:
    """Reject a model of images and texts that computes texts in its own way. Raises ModelError."""
    if first := find_first_position(model.base_model):
        raise ModelError(f"{type(model).__name__} counts positions from {first}, and this engine counts them from 0")


def _read_weights(
    directory: Path, config: PretrainedConfig, dtype: torch.dtype, kind: ModelKind, restoring: Restoring | None
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return the model and transformers' report. With `restoring`, the weights are the restored ones."""
    options: dict[str, Any] = {"config": config, "dtype": dtype, "device_map": None, "output_loading_info": True}
    if kind.own_attention and kind.classes[type(config)]._can_set_attn_implementation():
        options["attn_implementation"] = choose_attention(config)
    if restoring is None:
        options |= {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
        loaded: tuple[PreTrainedModel, dict[str, Any]] = kind.auto_class.from_pretrained(directory, **options)
    else:
        if (directory / "generation_config.json").is_file():
            options["generation_config"] = GenerationConfig.from_pretrained(directory, local_files_only=True)
        model_class = kind.classes[type(config)]
        if model_class.config_class is config.sub_configs.get("text_config"):
            options["config"] = config.get_text_config()  # as the automatic classes do
        loaded = model_class.from_pretrained(None, state_dict=dict(restoring.tensors), **options)
    return loaded


def choose_attention(config: PretrainedConfig) -> dict[str, str | None]:
    """Return our attention for the text model, and transformers' own for encoders, some of which know no other."""
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    decoder = config.get_text_config()
    return {"": interface.IMPLEMENTATION} | {
        name: interface.IMPLEMENTATION if _has_part(part, decoder) else None for name, part in parts.items()
    }


def _has_part(config: PretrainedConfig | None, wanted: PretrainedConfig) -> bool:
    """Return whether the configuration is the wanted one or contains it."""
    if config is None or config is wanted:
        return config is wanted
    return any(_has_part(getattr(config, name, None), wanted) for name in config.sub_configs)


def _checkpoint(path: str, config: PretrainedConfig, kind: ModelKind) -> Checkpoint:
    weights = getattr(config, "transformers_weights", None)  # transformers loads this file in place of its own
    return Checkpoint(Path(path), weights, vllm_serves=kind is CAUSAL_LM, restores=True)


def _drop_pooler(model: PreTrainedModel, loading_info: dict[str, Any]) -> None:
    """Remove the pooler, a classifier's layer over the first token.

    Embeddings do not use it, and checkpoints may lack it.
    """
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
        loading_info["missing_keys"] = {k for k in loading_info["missing_keys"] if not k.startswith("pooler.")}


def _number_attentions(model: PreTrainedModel) -> None:
    """Set the layer's number in attention modules without one, such as DistilBERT's. `probe` checks the order."""
    unnumbered = (part for part in model.modules() if hasattr(part, "is_causal") and not hasattr(part, "layer_idx"))
    for number, attention in enumerate(unnumbered):
        attention.layer_idx = number


def check_safetensors(directory: Path) -> None:
    """Reject weights in other formats: they are pickles, which can run code or crash the process. Raises ModelError."""
    others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in directory.glob(pattern))
    if others and not any(directory.glob("*.safetensors")):
        found = f"{directory} has its weights only as {', '.join(others)}"
        raise ModelError(
            f"{found}: use a commit of its repository that has safetensors, or save the model with "
            "safetensors (save_pretrained does)"
        )
