"""Reads from a ColBERT model's directory how a text becomes a vector for each token. Called by the runner at start.

Three kinds of files are known: those of sentence-transformers' MultiVectorEncoder, those of PyLate, and those of
Stanford's ColBERT, whose projection is a tensor of the checkpoint. sentence-transformers reads all of them too, and the
defaults here are its own.
"""

import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from conveyor_engine.errors import ModelError
from conveyor_engine.model_files import (
    SENTENCE_LIMITS,
    SENTENCE_MODULES,
    SENTENCE_SETTINGS,
    read_architectures,
    read_module_kinds,
    read_modules,
    read_object,
)
from conveyor_engine.tasks.embed.execution.dense import TOKEN_DENSE_FOLDERS
from conveyor_engine.tasks.embed.execution.files import read_limit
from conveyor_engine.tasks.embed.facts import TokenEncoding
from conveyor_engine.text.tokenizer import Tokenizer

STANFORD_CLASS: Final = "HF_ColBERT"
STANFORD_SETTINGS: Final = "artifact.metadata"
_MASK, _NORMALIZE = "MultiVectorMask", "Normalize"
_QUERY_TOKENS: Final = 32  # of an expanded query
_TOKENS_MAX: Final = 65_536
_WORDS_MAX: Final = 4096
_ROLES: Final = ("query", "document")


@dataclass(frozen=True, slots=True)
class TokenVectors:
    """How the hidden states of a text's tokens become vectors, and which tokens a query and a document have."""

    dense: tuple[str, ...] = ()  # the folders of the layers, in their order; empty: `linear.weight` of the checkpoint
    normalizes: bool = True
    instructions: Mapping[str, str] = field(default_factory=dict)  # texts that replace the model's instructions
    encodings: Mapping[str, TokenEncoding] = field(default_factory=dict)  # by the name of the instruction
    skipped: frozenset[int] = frozenset()  # the skiplist: tokens without a vector in some encodings
    max_seq_length: int | None = None


class _Settings(NamedTuple):
    """What the three kinds of files say in different words."""

    lengths: Mapping[str, object]  # limit on the tokens of a query or a document
    expansion: Mapping[str, Any] | None  # sentence-transformers' `query_expansion`
    skiplist: object
    prefixes: Mapping[str, object]  # in front of a text; one token, if the vocabulary has it
    without_skiplist: tuple[str, ...] = ("document",)  # roles


def read_token_vectors(directory: Path) -> TokenVectors | None:
    """Read the files; None if the model is no ColBERT model. Raises ModelError."""
    is_stanford = read_architectures(directory) == [STANFORD_CLASS]
    kinds = read_module_kinds(directory)
    if not is_stanford and (kinds[:2] != ["Transformer", "Dense"] or "Pooling" in kinds):
        return None
    settings = read_object(directory / SENTENCE_SETTINGS)
    dense = () if is_stanford else _read_dense(directory, kinds)
    if is_stanford:
        found = _read_stanford(directory)
    else:
        found = _read_native(directory) if _MASK in kinds else _read_pylate(settings)
    tokenizer = Tokenizer(directory)
    prompts = settings.get("prompts")
    prompts = prompts if isinstance(prompts, dict) else {}
    markers = {role: _find_marker(tokenizer, found.prefixes.get(role)) for role in _ROLES}
    texts = {role: _build_text(prompts.get(role), found.prefixes.get(role), markers[role]) for role in _ROLES}
    return TokenVectors(
        dense=dense,
        normalizes=_MASK not in kinds or _NORMALIZE in kinds,
        instructions=texts,
        encodings={role: _build_encoding(role, found, markers[role], tokenizer) for role in _ROLES},
        skipped=frozenset(_find_words(tokenizer, found.skiplist)),
        max_seq_length=read_limit(directory),
    )


def _read_dense(directory: Path, kinds: list[str]) -> tuple[str, ...]:
    """Return the folders of the Dense layers. Raises ModelError for modules that this engine does not support."""
    modules = read_modules(directory)
    dense = tuple(str(each.get("path")) for each, kind in zip(modules, kinds, strict=True) if kind == "Dense")
    others = kinds[1 + len(dense) :]
    is_known = kinds[1 : 1 + len(dense)] == ["Dense"] * len(dense) and len(set(others)) == len(others)
    if not is_known or not set(others) <= {_MASK, _NORMALIZE} or modules[0].get("path"):
        raise ModelError(
            f"{SENTENCE_MODULES} in {directory} has the steps {', '.join(kinds)[:200]}; for vectors of tokens this "
            f"engine has Transformer (at the root), up to {len(TOKEN_DENSE_FOLDERS)} Dense, {_MASK} and {_NORMALIZE}"
        )
    if dense != TOKEN_DENSE_FOLDERS[: len(dense)]:
        known = ", ".join(TOKEN_DENSE_FOLDERS)
        raise ModelError(f"{SENTENCE_MODULES} in {directory} has Dense steps in other folders than {known}")
    return dense


def _read_native(directory: Path) -> _Settings:
    """Read the files of sentence-transformers' MultiVectorEncoder."""
    limits = read_object(directory / SENTENCE_LIMITS)
    folders = [each.get("path") for each in read_modules(directory) if _MASK in str(each.get("type"))]
    folder = str(folders[0])
    if folder not in (f"{number}_{_MASK}" for number in (2, 3)) or not (directory / folder / "config.json").is_file():
        raise ModelError(f"{SENTENCE_MODULES} in {directory} has its {_MASK} in {folder[:100]!r}, which is missing")
    mask = read_object(directory / folder / "config.json")
    if mask.get("keep_only_token_ids"):
        raise ModelError(f"{directory / folder} keeps vectors only for some tokens, which is not supported")
    expansion = limits.get("query_expansion")
    if not isinstance(expansion, dict | None):
        raise ModelError(f"query_expansion in {directory / SENTENCE_LIMITS} is not an object")
    roles = mask.get("skiplist_tasks", ["document"])
    return _Settings(
        lengths={role: limits.get(f"{role}_length") for role in _ROLES},
        expansion=expansion,
        skiplist=mask.get("skiplist_words"),
        prefixes={},
        without_skiplist=tuple(roles) if isinstance(roles, list) else ("document",),
    )


def _read_pylate(settings: Mapping[str, Any]) -> _Settings:
    length = settings.get("query_length") or _QUERY_TOKENS
    attends = settings.get("attend_to_expansion_tokens") is True
    expands = settings.get("do_query_expansion") is not False
    return _Settings(
        lengths={"query": length, "document": settings.get("document_length")},
        expansion={"strategy": "fixed", "attend": attends, "length": length} if expands else None,
        skiplist=settings.get("skiplist_words", list(string.punctuation)),
        prefixes={role: settings.get(f"{role}_prefix") for role in _ROLES},
    )


def _read_stanford(directory: Path) -> _Settings:
    settings = read_object(directory / STANFORD_SETTINGS)
    length, attends = settings.get("query_maxlen") or _QUERY_TOKENS, settings.get("attend_to_mask_tokens") is True
    return _Settings(
        lengths={"query": length, "document": settings.get("doc_maxlen")},
        expansion={"strategy": "fixed", "attend": attends, "length": length},
        skiplist=[] if settings.get("mask_punctuation") is False else list(string.punctuation),
        prefixes={
            "query": settings.get("query_token_id") or "[unused0]",
            "document": settings.get("doc_token_id") or "[unused1]",
        },
    )


def _find_marker(tokenizer: Tokenizer, prefix: object) -> int | None:
    """Return the token that the whole prefix is, or its first word; None if it is a text."""
    if not isinstance(prefix, str) or not prefix.split():
        return None
    whole = tokenizer.find_id(prefix)
    return tokenizer.find_id(prefix.split(None, 1)[0]) if whole is None else whole


def _build_text(prompt: object, prefix: object, marker: int | None) -> str:
    """Return the text to put in front of a query or a document, besides the marker."""
    prompt, prefix = prompt if isinstance(prompt, str) else "", prefix if isinstance(prefix, str) else ""
    return ("" if marker is not None else prefix) + prompt.removeprefix(prefix)


def _build_encoding(role: str, found: _Settings, marker: int | None, tokenizer: Tokenizer) -> TokenEncoding:
    max_tokens, drops_skiplist = _read_number(found.lengths.get(role)), role in found.without_skiplist
    expansion = found.expansion if role == "query" else None
    if expansion is None:
        return TokenEncoding(marker=marker, max_tokens=max_tokens, drops_skiplist=drops_skiplist)
    length = _read_number(expansion.get("length"))
    return TokenEncoding(
        marker=marker,
        max_tokens=length if expansion.get("strategy") == "fixed" else max_tokens,
        num_tokens=length,
        filler=_find_filler(tokenizer, expansion.get("token")),
        attends=expansion.get("attend") is True,
        drops_skiplist=drops_skiplist,
    )


def _read_number(value: object) -> int:
    """Return a number of tokens; 0 if there is none. Raises ModelError."""
    if value is None:
        return 0
    if type(value) is not int or not 2 < value <= _TOKENS_MAX:
        raise ModelError(f"the model's files have {str(value)[:100]!r} as the length of a query or a document")
    return value


def _find_filler(tokenizer: Tokenizer, named: object) -> int:
    """Return the token with which queries are expanded. Raises ModelError."""
    if isinstance(named, str):
        found = tokenizer.find_id(named)
    else:
        ids = map(tokenizer.find_special_id, ("mask_token", "eos_token"))
        found = next((each for each in ids if each is not None), None)
    if found is None:
        raise ModelError("the model's files expand queries with a token that its tokenizer does not have")
    return found


def _find_words(tokenizer: Tokenizer, words: object) -> Iterable[int]:
    """Return the tokens of the skiplist. Words that are no token of the vocabulary are left out."""
    listed = words if isinstance(words, list) else []
    found = (tokenizer.find_id(word) for word in listed[:_WORDS_MAX] if isinstance(word, str))
    return (each for each in found if each is not None and each != tokenizer.unknown_id)
