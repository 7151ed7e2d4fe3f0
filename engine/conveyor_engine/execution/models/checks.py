"""Rejects models that this engine cannot run, with a reason, before the first request.

Many models load and run here but give wrong answers, because they need something that our attention or the packed
batch does not provide. All checks raise ModelError. Also turns errors of transformers into ModelErrors. `preview` runs
a part of the checks where there is no torch.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, PretrainedConfig
from transformers.utils import is_torch_available

from conveyor_engine.errors import ModelError, is_out_of_memory
from conveyor_engine.execution.models.kinds import ModelKind, is_encoder
from conveyor_protocol.failure_reasons import FailureReason

# The errors that transformers raises for an invalid config.json or invalid weights. Errors of the device have the same
# types, so each handler around work on the device first passes the error to `raise_if_of_device`.
TRANSFORMERS_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, SafetensorError,
    StrictDataclassError, TypeError, ValueError,
)  # fmt: skip
Result = TypeVar("Result")
# Types of RoPE whose frequencies depend on the longest text of a batch. See `rope`.
CHANGING: Final = frozenset({"dynamic", "longrope"})
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# Layers that keep a state for each row, alone or beside attention, and layers that keep nothing.
_OTHER_LAYER_TYPES = frozenset({"linear_attention", "conv", "mamba", "hybrid", "mlp", "moe"})


def on_one_line(error: Exception) -> str:
    """Return the error's type and text on one line, for the end of a sentence."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def raise_if_of_device(error: Exception) -> None:
    """Raise the error again if the device caused it and not the model.

    Without this check, running out of memory would be reported as an unsupported model.
    """
    is_of_accelerator = any(each.__name__ == "AcceleratorError" for each in type(error).__mro__)  # torch's
    if is_of_accelerator or is_out_of_memory(error) or "CUDA error" in str(error):
        raise error


def run_once(problem: str, run: Callable[[], Result]) -> Result:
    """Run the model as a trial. Raises ModelError, which begins with `problem`, if its parts do not fit each other."""
    import torch

    try:
        with torch.inference_mode():
            return run()
    except TRANSFORMERS_ERRORS as error:
        raise_if_of_device(error)
        raise ModelError(f"{problem}: {on_one_line(error)}") from error


def read_config(directory: Path, kind: ModelKind) -> PretrainedConfig:
    """Return the configuration of a model that `check_config` accepts. Raises ModelError."""
    if not (directory / "config.json").is_file():
        message = f"{directory} is not a model directory: it has no config.json"
        raise ModelError(message, reason=FailureReason.MODEL_NOT_FOUND)
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except TRANSFORMERS_ERRORS as error:
        raise ModelError(f"{directory}/config.json cannot be used: {on_one_line(error)}") from error
    check_config(config, kind)
    return config


def check_config(config: PretrainedConfig, model_kind: ModelKind) -> None:
    """Reject models that cannot run according to their configuration. Raises ModelError.

    Without torch, transformers does not load the model's class, so the class is not checked.
    """
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False) and not model_kind.encodes_and_decodes:
        raise ModelError(f"{kind} is an encoder-decoder; this engine runs decoder-only language models and encoders")
    found = model_kind.of(config)
    if found is None:
        only = f"this engine runs only those to {model_kind.task}"
        raise ModelError(f"{kind} has no {model_kind.name} in transformers; {only}{or_vllm(model_kind)}")
    if model_kind.own_attention:
        if is_torch_available() and not _uses_interface(found.classes[type(config)], config, model_kind):
            return
        _check_attention(config, model_kind)


def or_vllm(kind: ModelKind) -> str:
    """Return the end of an error's sentence, which names vLLM as a way out if it has the task."""
    return "; serve it with `runtime: VLLM`" if kind.task == "generate" else ""


def _uses_interface(model_class: Any, config: PretrainedConfig, model_kind: ModelKind) -> bool:
    """Return whether the class calls our attention. Otherwise only `alone` can run it, and only encoders."""
    if model_class._can_set_attn_implementation():
        return True
    if model_kind.task != "generate" and is_encoder(config):
        return False
    raise ModelError(
        f"{model_class.__name__} does not use transformers' attention interface, so this engine cannot run it"
        + or_vllm(model_kind)
    )


def _check_attention(config: PretrainedConfig, model_kind: ModelKind) -> None:
    kind, way_out = config.model_type, or_vllm(model_kind)
    text = config.get_text_config()
    layer_types = set(getattr(text, "layer_types", None) or ())
    if unknown := sorted(layer_types - _LAYER_TYPES - _OTHER_LAYER_TYPES):
        raise ModelError(f"{kind} has layers of type {', '.join(unknown)}; this engine does not run these{way_out}")
    # `rope` fixes one set of frequencies in models that generate.
    is_fixed = model_kind.task == "generate" and not _has_several_ropes(text)
    if (refused := sorted(_rope_types(text) & CHANGING)) and not is_fixed:
        raise ModelError(
            f"{kind} uses RoPE scaling of type {', '.join(refused)}, which depends on the batch and is not supported"
            + way_out
        )


def _has_several_ropes(config: PretrainedConfig) -> bool:
    """Return whether types of layers have rotary embeddings of their own."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return any(isinstance(value, Mapping) for value in parameters.values())


def _rope_types(config: PretrainedConfig) -> set[str]:
    """Return all RoPE types in the configuration, for the whole model or for a type of layer."""
    found: set[str] = set()
    for name in ("rope_parameters", "rope_scaling"):
        parameters = getattr(config, name, None) or {}
        for entry in (parameters, *parameters.values()):
            if isinstance(entry, Mapping):
                found.add(str(entry.get("rope_type") or entry.get("type") or "default"))
    return found


def check_weights(path: str, loading_info: Mapping[str, Any]) -> None:
    """Reject a checkpoint with missing weights, which would get random values. Raises ModelError."""
    for problem in ("missing_keys", "mismatched_keys", "error_msgs"):
        if found := sorted(map(str, loading_info.get(problem) or ())):
            kind = problem.replace("_", " ")
            raise ModelError(
                f"the weights in {path} are not those of its config.json: {len(found)} {kind}, first {found[0]}"
            )
