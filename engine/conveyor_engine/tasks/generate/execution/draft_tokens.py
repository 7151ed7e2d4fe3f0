"""Checks that a draft model has the tokens of the model for which it guesses. Used by `draft`.

Compares the vocabularies and the special tokens in both tokenizer.json. How they split texts does not matter, because
the draft model reads no text.
"""

import filecmp
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from conveyor_engine.errors import ConfigError

_TOKENIZER: Final = "tokenizer.json"
_MAX_BYTES: Final = 64 << 20  # of one file; that of Gemma 3 has 33 MB
_SHOWN: Final = 40  # characters of a token in a message


def has_tokenizer(directory: Path) -> bool:
    """Return whether the directory has a tokenizer."""
    return (directory / _TOKENIZER).is_file()


def check_tokens(model: Path, draft: Path, sizes: tuple[int, int]) -> None:
    """Raise ConfigError if the draft model's tokens are not those of the model.

    model, draft: their directories. sizes: of their embeddings, compared if neither directory has a tokenizer.
    """
    of_model, of_draft = model / _TOKENIZER, draft / _TOKENIZER
    if not of_model.is_file() and not of_draft.is_file():
        if sizes[0] != sizes[1]:
            raise _refuse(f"the model has {sizes[0]} tokens and the draft model {sizes[1]}")
    elif not of_draft.is_file():
        raise _refuse(f"the draft model has no {_TOKENIZER}")
    elif not of_model.is_file():
        raise _refuse(f"the model has no {_TOKENIZER}")
    elif not filecmp.cmp(of_model, of_draft, shallow=False):
        for what, ours, theirs in zip(("token", "special token"), _read(of_model), _read(of_draft), strict=True):
            if (difference := _find_difference(ours, theirs)) is not None:
                raise _refuse(f"{what} {difference}")


def _read(path: Path) -> tuple[dict[int, str], dict[int, str]]:
    """Return all tokens and the special tokens, by their numbers."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES >> 20} MiB")
        content: dict[str, Any] = json.loads(path.read_text())
        vocabulary, added = content["model"]["vocab"], content.get("added_tokens") or []
        is_list = isinstance(vocabulary, list)  # of pieces with their scores, as in Unigram
        numbered = enumerate(piece for piece, _ in vocabulary) if is_list else ((n, t) for t, n in vocabulary.items())
        tokens = {int(number): str(token) for number, token in numbered}
        tokens |= {int(each["id"]): str(each["content"]) for each in added}
        return tokens, {int(each["id"]): str(each["content"]) for each in added if each["special"]}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _refuse(f"{path} cannot be read: {error}") from error


def _find_difference(ours: Mapping[int, str], theirs: Mapping[int, str]) -> str | None:
    if ours == theirs:
        return None
    number = min(each for each in ours.keys() | theirs.keys() if ours.get(each) != theirs.get(each))
    names = [repr(each[number][:_SHOWN]) if number in each else "nothing" for each in (ours, theirs)]
    return f"{number} is {names[0]} in the model and {names[1]} in the draft model"


def _refuse(why: str) -> ConfigError:
    return ConfigError(f"`draft_model` must have the tokens of the model, but {why}; use a draft model of its family")
