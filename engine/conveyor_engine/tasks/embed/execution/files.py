"""Reads from a model's directory how it turns text into a vector. Called by the runner at start.

An embedding model has sentence-transformers' files in addition to config.json. `modules.json` names the steps from text
to vector. `1_Pooling/config.json` says how hidden states become a vector, and `dense` reads the layers behind it.
`config_sentence_transformers.json` has instructions to put in front of a text. Without these files the defaults of
`Pooling` and `Instructions` apply. Steps that this engine does not support are rejected, because the vector would
differ.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from conveyor_engine.errors import ModelError
from conveyor_engine.model_files import (
    SENTENCE_LIMITS,
    SENTENCE_MODULES,
    SENTENCE_SETTINGS,
    read_module_kinds,
    read_modules,
    read_object,
)
from conveyor_engine.tasks.embed.execution.dense import DENSE_FOLDERS
from conveyor_engine.tasks.embed.facts import PoolingMode

_CAPITALS = ("ABCDEFGHIJKLMNOPQRSTUVWXYZ", "The Quick FOX", "ÄÉÑ ΣΔ ЖЯ")
_INSTRUCTIONS_MAX, _INSTRUCTION_CHARACTERS_MAX = 256, 4096  # current models have at most 60, each far shorter
_STEPS = re.compile("Transformer Pooling( Dense){0,2}( Normalize)?")
_SPLADE_STEPS = re.compile("(MLM)?Transformer SpladePooling")
_FOLDER = re.compile(r"[\w-]{1,100}", re.ASCII)
# The keys are the values of `pooling_mode` in newer files of sentence-transformers, and the flags in older files.
_MODES: dict[str, PoolingMode] = {
    "cls": "cls", "mean": "mean", "lasttoken": "last",
    "pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pooling:
    """How the hidden states of a text become one vector.

    Without files, the mode is `last` for models with causal attention and `mean` for others. Vectors are normalised, as
    OpenAI's are.
    """

    mode: PoolingMode | None = None
    normalizes: bool = True
    dense: tuple[str, ...] = ()  # the folders of the layers through which the vector goes, in their order
    max_seq_length: int | None = None  # the limit on a text's tokens in `SENTENCE_LIMITS`; None: the file has none
    has_vector: bool = True  # false: SPLADE, whose files describe only sparse vectors


@dataclass(frozen=True, slots=True)
class Instructions:
    """Texts to put in front of an input, by name, such as `query`.

    `default` is the name for requests that name none. If it is empty, such inputs get no instruction.
    """

    texts: Mapping[str, str] = field(default_factory=dict)
    default: str = ""


def read_instructions(directory: Path) -> Instructions:
    """Read the instructions, which sentence-transformers calls prompts. Raises ModelError."""
    settings = read_object(directory / SENTENCE_SETTINGS)
    texts, default = settings.get("prompts") or {}, settings.get("default_prompt_name") or ""
    file = f"{SENTENCE_SETTINGS} in {directory}"
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise ModelError(f"the prompts in {file} are not an object of texts")
    if len(texts) > _INSTRUCTIONS_MAX or max(map(len, texts.values()), default=0) > _INSTRUCTION_CHARACTERS_MAX:
        most = f"{_INSTRUCTIONS_MAX} prompts of {_INSTRUCTION_CHARACTERS_MAX} characters"
        raise ModelError(f"{file} has more than {most}, the limit of this engine")
    if default and default not in texts:
        raise ModelError(f"{file} names the default prompt {str(default)[:100]!r}, which is not among its prompts")
    if any(texts.values()) and not _pools_instructions(directory):
        raise ModelError(f"the pooling in {directory} leaves prompts out (include_prompt), which is not supported")
    return Instructions(texts, default)


def _pools_instructions(directory: Path) -> bool:
    folders = [module.get("path") for module in read_modules(directory)[1:2]]
    return all(read_object(directory / str(folder) / "config.json").get("include_prompt", True) for folder in folders)


def read_pooling(directory: Path) -> Pooling:
    """Read the pooling. Raises ModelError for steps that this engine does not support."""
    if not (directory / SENTENCE_MODULES).is_file():
        return Pooling()
    modules, kinds = read_modules(directory), read_module_kinds(directory)
    if _SPLADE_STEPS.fullmatch(" ".join(kinds)) and not modules[0].get("path"):
        return Pooling(max_seq_length=read_limit(directory), has_vector=False)
    if not _STEPS.fullmatch(" ".join(kinds)) or modules[0].get("path"):
        raise ModelError(
            f"{SENTENCE_MODULES} in {directory} has the steps {', '.join(kinds)[:200]}; this engine has Transformer "
            f"(at the root), Pooling, up to {len(DENSE_FOLDERS)} Dense and Normalize, in this order, or SpladePooling "
            "behind Transformer"
        )
    dense = tuple(str(module.get("path")) for module, kind in zip(modules, kinds, strict=True) if kind == "Dense")
    if dense != DENSE_FOLDERS[: len(dense)]:
        raise ModelError(f"{SENTENCE_MODULES} in {directory} has Dense steps outside of {' and '.join(DENSE_FOLDERS)}")
    limit = read_limit(directory)
    return Pooling(_read_mode(directory, modules[1].get("path")), "Normalize" in kinds, dense, limit)


def read_limit(directory: Path) -> int | None:
    """Return the limit on a text's tokens in `SENTENCE_LIMITS`; None: the file has none. Raises ModelError."""
    limits = read_object(directory / SENTENCE_LIMITS)
    if limits.get("do_lower_case") is True and not _lowers(directory):
        raise ModelError(
            f"{SENTENCE_LIMITS} in {directory} asks for lower case, but its tokenizer.json keeps upper case"
        )
    longest = limits.get("max_seq_length")
    return longest if type(longest) is int and longest > 1 else None


def _lowers(directory: Path) -> bool:
    """Return whether the tokenizer itself converts a text to lower case."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return all(tokenizer.encode(text).ids == tokenizer.encode(text.lower()).ids for text in _CAPITALS)


def _read_mode(directory: Path, folder: object) -> PoolingMode:
    if not isinstance(folder, str) or not _FOLDER.fullmatch(folder):
        raise ModelError(
            f"{SENTENCE_MODULES} in {directory} has its pooling in {str(folder)[:100]!r}, which is not a folder name"
        )
    path = directory / folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{path}, which {SENTENCE_MODULES} names, is missing")
    named = _modes(read_object(path))
    if len(named) != 1 or named[0] not in _MODES:
        raise ModelError(
            f"{path} asks for the pooling {' and '.join(named) or '(none)'}; this engine supports exactly one "
            "of the first token's, the last token's and the mean"
        )
    return _MODES[named[0]]


def _modes(content: Mapping[str, Any]) -> list[str]:
    mode = content.get("pooling_mode")
    if isinstance(mode, str):
        return [mode]
    if isinstance(mode, list | tuple):
        return list(map(str, mode))
    return [name for name, value in content.items() if name.startswith("pooling_mode_") and value is True]
