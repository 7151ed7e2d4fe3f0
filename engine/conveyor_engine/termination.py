"""Writes the termination message, which appears in the container's status. Called by `__main__`.

The message is a JSON object in the file that the environment variable TERMINATION_LOG names. After an error it is
{"reason": FailureReason, "message": sentence}; after a fetch {"contextLength": tokens, "task": name, "quantization":
names, "weightBytes": bytes}, from the model's files.
"""

import json
import logging
import os
from pathlib import Path
from typing import Any

from conveyor_engine import registry
from conveyor_engine.errors import ModelError, one_line
from conveyor_engine.gguf.files import find_files
from conveyor_engine.gguf.header import read_header
from conveyor_engine.model_files import read_object, read_weight_names
from conveyor_engine.quantization import read_declared
from conveyor_protocol.failure_reasons import FailureReason

# Model families that this engine runs and whose positions begin after the padding token's id. The engine itself detects
# them with a forward pass (`execution.models.packing`), which needs the weights.
COUNT_FROM_PADDING = (
    "roberta",
    "xlm-roberta",
    "xlm-roberta-xl",
    "camembert",
    "roberta-prelayernorm",
    "data2vec-text",
    "mpnet",
)
_PADDING_TOKEN_ID = 1  # the default of these families, if config.json has no `pad_token_id`
_log = logging.getLogger(__name__)


def write_termination_message(reason: FailureReason, message: str) -> None:
    """Write the reason and the message. Does nothing without TERMINATION_LOG. A write error is only logged."""
    _write({"reason": reason, "message": one_line(message)})


def write_facts(model: Path) -> None:
    """Write context length, task, quantization and bytes of a model; each only if the model's files show it."""
    facts = _read_gguf(model) or {
        "contextLength": find_context_length(model),
        "task": _find_task(model),
        "quantization": _find_quantization(model),
        "weightBytes": sum(path.stat().st_size for path in _list_weights(model) if path.is_file()) or None,
    }
    if known := {name: fact for name, fact in facts.items() if fact is not None}:
        _write(known)


def _read_gguf(model: Path) -> dict[str, Any] | None:
    """Return the facts of a model in a GGUF file; None for another."""
    try:
        paths = find_files(model)
        header = read_header(paths) if paths else None
    except ModelError:
        return {}  # the engine will report the error
    if header is None:
        return None
    length = header.find("context_length")
    return {
        "contextLength": length if type(length) is int and length > 1 else None,
        "task": "embed" if header.pools else "generate",
        "quantization": f"gguf {header.file_type}".rstrip(),
        "weightBytes": sum(place.num_bytes for place in header.tensors.values()) or None,
    }


def find_context_length(model: Path) -> int | None:
    """Return the longest context, in tokens, that the model in this folder was made for; None if it is not known."""
    config, limits = _read(model / "config.json"), _read(model / "sentence_bert_config.json")
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        return None  # the engine will report the error
    positions = text.get("max_position_embeddings", text.get("n_positions"))
    if type(positions) is not int or positions - _first_position(text) <= 1:
        return None
    lengths = (positions - _first_position(text), limits.get("max_seq_length"))
    return min(length for length in lengths if type(length) is int and length > 1)


def _find_task(model: Path) -> str | None:
    try:
        return registry.find_task("auto", model)
    except ModelError:
        return None  # the engine will report the error


def _find_quantization(model: Path) -> str | None:
    try:
        declared = read_declared(model)
    except ModelError:
        return None  # the engine will report the error
    return declared.name if declared is not None else None


def _list_weights(model: Path) -> list[Path]:
    """Return the files with weights: those of an index, or `model.safetensors`, or all; also in folders of parts.

    Mistral's repositories have the same weights again in `consolidated.safetensors`.
    """
    try:
        names = read_weight_names(model, "model.safetensors.index.json")
    except ModelError:
        return []  # the engine will report the error
    if names is not None:
        return [model / name for name in names]
    whole = model / "model.safetensors"
    return [*([whole] if whole.is_file() else model.glob("*.safetensors")), *model.glob("*/*.safetensors")]


def _first_position(config: dict[str, Any]) -> int:
    """Return the position of a sequence's first token."""
    padding = config.get("pad_token_id", _PADDING_TOKEN_ID)
    counts_from_padding = config.get("model_type") in COUNT_FROM_PADDING
    return padding + 1 if counts_from_padding and type(padding) is int and padding >= 0 else 0


def _read(path: Path) -> dict[str, Any]:
    """Return the JSON object; empty if the file is missing or cannot be read, which the engine will report."""
    try:
        return read_object(path)
    except ModelError:
        return {}


def _write(content: dict[str, Any]) -> None:
    path = os.environ.get("TERMINATION_LOG")
    if not path:
        return
    try:
        Path(path).write_text(json.dumps(content, ensure_ascii=False))
    except OSError as error:
        _log.warning("event=termination_message_not_written path=%s error=%s", path, error.strerror)
