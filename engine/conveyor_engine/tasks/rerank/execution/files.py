"""Reads from sentence-transformers' files how a causal model ranks. Called by `token_scorer` at start. No torch.

`1_LogitScore/config.json` has the tokens whose logits are the score. The chat template renders a pair of texts.
Settings that this engine does not support are rejected, because the scores would differ.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from transformers import PretrainedConfig

from conveyor_engine.errors import InvalidRequest, ModelError
from conveyor_engine.execution.models.classifier_files import read_activation
from conveyor_engine.limited import run_limited
from conveyor_engine.model_files import SENTENCE_LIMITS, SENTENCE_MODULES, SENTENCE_SETTINGS, read_list, read_object
from conveyor_engine.text.chat_template import Rendering, TooManyCharacters
from conveyor_engine.text.tokenizer import read_chat_template
from conveyor_engine.wire.classification import ClassifierFacts, PairTemplate

_FOLDER: Final = "1_LogitScore"
_INSTRUCTION_CHARACTERS_MAX: Final = 4096
_CHARACTERS_MAX: Final = 2**20
# Variables that only sentence-transformers reads, or that change nothing in a rendered text.
_NOT_FOR_TEMPLATES: Final = frozenset({"restore_suffix", "truncation", "max_length", "padding"})
_CPU_SECONDS: Final = 5.0  # the longest templates take 0.1 s
_PAIR: Final = ("which fox is quick", "the brown fox jumps")


@dataclass(frozen=True, slots=True)
class Scorer:
    """How a causal model ranks."""

    token_ids: tuple[int, ...]  # the token of a match, and that of none, whose logit is subtracted, if there is one
    facts: ClassifierFacts
    max_seq_length: int | None  # limit on a prompt's tokens; None: the files have none


def read_scorer(directory: Path, config: PretrainedConfig) -> Scorer:
    """Read the files. Raises ModelError."""
    settings, limits = read_object(directory / SENTENCE_SETTINGS), read_object(directory / SENTENCE_LIMITS)
    longest = limits.get("max_seq_length")
    facts = ClassifierFacts(
        labels=("LABEL_0",),
        activation=read_activation(settings, config),
        template=_read_template(directory, settings, limits),
    )
    usable = longest if type(longest) is int and longest > 1 else None
    return Scorer(_read_tokens(directory, config.vocab_size), facts, usable)


def _read_tokens(directory: Path, vocab_size: int) -> tuple[int, ...]:
    path = directory / _FOLDER / "config.json"
    if read_list(directory / SENTENCE_MODULES)[1].get("path") != _FOLDER or not path.is_file():
        raise ModelError(f"{SENTENCE_MODULES} in {directory} needs {_FOLDER}/config.json, which is missing")
    config = read_object(path)
    named = (config.get("true_token_id"), config.get("false_token_id"))
    token_ids = named[: 1 if named[1] is None else 2]
    if not all(type(token_id) is int and 0 <= token_id < vocab_size for token_id in token_ids):
        raise ModelError(f"{path} names tokens that the model does not have: {str(named)[:100]}")
    return tuple(int(str(token_id)) for token_id in token_ids)


def _read_template(directory: Path, settings: dict[str, Any], limits: dict[str, Any]) -> PairTemplate:
    found: dict[str, Any] = limits
    for name in ("processing_kwargs", "chat_template"):
        found = found.get(name) or {}
        if not isinstance(found, dict):
            raise ModelError(f"{name} in {directory / SENTENCE_LIMITS} is not an object")
    variables = {name: value for name, value in found.items() if name not in _NOT_FOR_TEMPLATES}
    template = PairTemplate(
        instruction=_read_instruction(directory, settings),
        in_parts=_takes_parts(limits),
        add_generation_prompt=variables.pop("add_generation_prompt", False) is True,
        variables=variables,
    )
    run_limited("the model's chat template", lambda: _try(directory, template), _CPU_SECONDS)
    return template


def _try(directory: Path, template: PairTemplate) -> None:
    """Raise ModelError unless the chat template renders both texts of a pair."""
    chat = read_chat_template(directory)
    if chat is None:
        raise ModelError(f"{directory} has no chat template, which would render a query and a document")
    rendering = Rendering(add_generation_prompt=template.add_generation_prompt)
    try:
        text = chat.render(template.list_messages(*_PAIR), _CHARACTERS_MAX, template.variables, rendering)
    except (InvalidRequest, TooManyCharacters) as error:
        raise ModelError(f"the chat template in {directory} does not render a query and a document: {error}") from error
    if not all(part in text for part in _PAIR):
        raise ModelError(
            f"the chat template in {directory} does not render messages of the roles 'query' and 'document'"
        )


def _takes_parts(limits: dict[str, Any]) -> bool:
    """Return whether the content of messages is a list of parts."""
    modalities = limits.get("modality_config")
    of_messages = modalities.get("message") if isinstance(modalities, dict) else None
    return isinstance(of_messages, dict) and of_messages.get("format") == "structured"


def _read_instruction(directory: Path, settings: dict[str, Any]) -> str:
    """Return the text of the default prompt; empty if there is none."""
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name") or None
    text = prompts.get(default, "") if isinstance(prompts, dict) and isinstance(default, str) else ""
    if default is not None and not (isinstance(text, str) and 0 < len(text) <= _INSTRUCTION_CHARACTERS_MAX):
        raise ModelError(f"{SENTENCE_SETTINGS} in {directory} has no usable text for its default prompt")
    return text
