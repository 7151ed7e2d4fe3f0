"""Makes a model directory of a GGUF file, so that the rest of the engine reads it like any other. Called by `__main__`.

The directory has links to the GGUF files, and what they contain: config.json, tokenizer.json, tokenizer_config.json
with the chat template, and generation_config.json. transformers builds the tokenizer. A child process with limits does
all this, because a tenant wrote the file.
"""

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from conveyor_engine.errors import ModelError
from conveyor_engine.gguf.config import build_config
from conveyor_engine.gguf.files import SUFFIX, find_files
from conveyor_engine.gguf.header import Header, read_header
from conveyor_engine.limited import run_limited

CPU_SECONDS: Final = 120.0  # a vocabulary of 262,000 tokens without merges takes 20 s
_SPECIAL: Final = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# What ends an answer: tokens that the file names, and control tokens that llama.cpp knows by their text.
_ENDS: Final = ("eos", "eot", "eom")
_ENDING_TEXTS: Final = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>",
    "<｜end▁of▁sentence｜>", "<|end_of_text|>", "<end_of_utterance>", "<|return|>", "<|call|>",
})  # fmt: skip
_HARMONY: Final = {"<|return|>", "<|call|>"}
_CONTROL: Final = 3  # llama.cpp's type of a token


def unpack(model: Path) -> Path:
    """Return the directory that the engine serves: a new one if `model` is a GGUF file or has one, else `model`.

    Raises ModelError.
    """
    paths = find_files(model)
    if not paths:
        return model
    directory = make_temporary("gguf-") / model.resolve().name.removesuffix(SUFFIX)
    directory.mkdir()
    run_limited(f"{paths[0]}", lambda: _write(directory, paths), CPU_SECONDS)
    for number, path in enumerate(paths):
        (directory / f"model-{number:05}{SUFFIX}").symlink_to(path.resolve())
    return directory


def make_temporary(prefix: str) -> Path:
    """Return a new folder that this process removes when it ends. A forked process does not remove it."""
    folder, owner = Path(tempfile.mkdtemp(prefix=prefix)), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def _write(directory: Path, paths: Sequence[Path]) -> None:
    header = read_header(paths)
    files = {"config.json": build_config(header)} | _build_tokenizer(header)
    for name, content in files.items():
        (directory / name).write_text(content if isinstance(content, str) else json.dumps(content))


def _build_tokenizer(header: Header) -> dict[str, Any]:
    """Return the files of the tokenizer, as transformers reads them from a GGUF file. Raises ModelError."""
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        raise ModelError("the GGUF file has no tokenizer (tokenizer.ggml.tokens)")
    try:
        from transformers import PreTrainedTokenizerFast
        from transformers.integrations.gguf import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer

        groups = {
            group: {name: header.metadata[f"tokenizer.{key}"] for key, name in names.items()
                    if f"tokenizer.{key}" in header.metadata}
            for group, names in GGUF_TOKENIZER_MAPPING.items()
        }  # fmt: skip
        backend, _ = convert_gguf_tokenizer(header.architecture, groups["tokenizer"])
        settings = _read_settings(header, groups["tokenizer_config"], tokens)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **settings)
        written = tokenizer.backend_tokenizer.to_str()
    except ImportError as error:
        raise ModelError(f"this version of transformers does not read GGUF files; use 5.23: {error}") from error
    except Exception as error:  # `tokenizers` raises bare Exception
        raise ModelError(f"the GGUF file's tokenizer cannot be used: {error!r}"[:500]) from error
    ends = {"eos_token_id": _find_ends(header, tokens)}
    return {"tokenizer.json": written, "tokenizer_config.json": settings, "generation_config.json": ends}


def _read_settings(header: Header, found: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    settings = dict(found)
    if header.metadata.get("tokenizer.ggml.model") == "llama":
        settings.setdefault("add_bos_token", True)  # llama.cpp adds it unless the file says otherwise
    elif header.metadata.get("tokenizer.ggml.model") == "gemma4":
        settings["add_bos_token"] = False  # its template writes the token, and the original tokenizer adds none
    for name, key in _SPECIAL.items():
        token = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if type(token) is int and 0 <= token < len(tokens):
            settings[name] = tokens[token]
    return settings


def _find_ends(header: Header, tokens: Sequence[str]) -> list[int]:
    found = (header.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in _ENDS)
    named = {token for token in found if type(token) is int}
    kinds = header.metadata.get("tokenizer.ggml.token_type")
    kinds = kinds if isinstance(kinds, list) else []
    known = {
        token
        for token, (text, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == _CONTROL and text in _ENDING_TEXTS
    }
    ends = {token for token in named | known if 0 <= token < len(tokens)}
    if {tokens[token] for token in ends} >= _HARMONY:  # there, <|end|> ends a part of the answer
        ends -= {token for token in ends if tokens[token] == "<|end|>"}
    return sorted(ends)
