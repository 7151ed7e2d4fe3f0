"""What the arguments of `vllm serve` are as settings of the engine. Used by `plugin`. Imports neither side."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Our setting for each of vLLM's that has one; its value is the same.
_SAME = {
    "--max-model-len": "--max-model-len",
    "--max-num-seqs": "--max-num-seqs",
    "--served-model-name": "--served-model-name",
    "--host": "--host",
    "--port": "--port",
}
_MARKS = {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}  # which the engine finds in the template
_TOOL_PARSERS = {"hermes": "hermes", "llama3_json": "llama3_json", "mistral": "mistral"}
_REASONING_PARSERS = {"qwen3": "think", "deepseek_r1": "think", "mistral": "mistral"}
# What decides how vLLM computes, or opens what the engine always has open. None of it changes an answer of ours.
_WITHOUT_EFFECT = {
    "--enforce-eager", "--dtype", "--gpu-memory-utilization", "--seed", "--runner", "--enable-auto-tool-choice",
    "--structured-outputs-config.backend", "--enable-prompt-tokens-details", "--enable-chunked-prefill",
    "--trust-remote-code", "--max-num-batched-tokens", "--tokenizer-mode",
    "--config-format", "--ignore-patterns", "--enable-prefix-caching", "--load-format", "--no-async-scheduling",
    "--enable-server-load-tracking", "--show-hidden-metrics-for-version", "--enable-tokenizer-info-endpoint",
    "--skip-tokenizer-init", "--max-logprobs", "--enable-request-id-headers",
}  # fmt: skip
# A test of what these do is not applicable (`files` has its name); the others of its file are.
_LEFT_OUT = {
    "--enable-lora", "--lora-modules", "--max-lora-rank", "--max-cpu-loras",  # adapters
    "--enable-per-request-metrics",  # times of a request in its answer
}  # fmt: skip
_MISSING = {
    "--uds": "unix sockets",
    "--api-key": "keys: the gateway's neighbours check them",
    "--root-path": "a path in front of all others",
    "--pooler-config": "texts in chunks",
    "--pooler-config.task": "vectors or labels of each token on /pooling",
    "--enable-force-include-usage": "usage that nobody asked for",
    "--return-tokens-as-token-ids": "tokens as ids unless a request says so",
    "--watermark-config": "watermarks",
    "--speculative-config": "speculative decoding",
    "--enable-prompt-embeds": "prompts that are tensors",
    "--tool-server": "tools that the server runs",
}


class NotApplicable(Exception):
    """The server cannot be started as a test wants it; the text says what the engine does not have."""


@dataclass(slots=True)
class Arguments:
    """A command line for the engine, without the model."""

    settings: list[str] = field(default_factory=list)
    chat_template: str | None = None  # the text of one that takes the place of the model's
    config: dict[str, Any] = field(default_factory=dict)  # fields that its config.json gets


def translate(arguments: Sequence[str]) -> Arguments:
    """Raises NotApplicable for what the engine lacks, and ValueError for an argument that no table here has."""
    translated = Arguments()
    parsers = {"--tool-parser": "none", "--reasoning-parser": "none"}  # what vLLM has without an argument
    for flag, values in _split(arguments):
        value = values[0] if values else ""
        if flag in _MISSING:
            raise NotApplicable(f"`{flag}`: {_MISSING[flag]}")
        if flag in _SAME:
            translated.settings += [_SAME[flag], value]
        elif flag == "--no-enable-prefix-caching":
            translated.settings += ["--prefix-caching", "false"]
        elif flag == "--tool-call-parser":
            parsers["--tool-parser"] = _parser(flag, value, _TOOL_PARSERS)
        elif flag == "--reasoning-parser":
            parsers["--reasoning-parser"] = _parser(flag, value, _REASONING_PARSERS)
        elif flag == "--hf-overrides":
            translated.config = json.loads(value)
        elif flag == "--reasoning-config" and json.loads(value) != _MARKS:
            raise NotApplicable(f"`{flag}`: other marks of thinking than {', '.join(_MARKS.values())}")
        elif flag == "--chat-template":
            translated.chat_template = Path(value).read_text() if Path(value).is_file() else value
        elif flag not in _WITHOUT_EFFECT | _LEFT_OUT | {"--reasoning-config"}:
            raise ValueError(f"e2e/peers_tests/arguments.py does not know {flag} {' '.join(values)}")
    for name, value in parsers.items():
        translated.settings += [name, value]
    return translated


def _split(arguments: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Each flag with its values, from `--flag value...` and `--flag=value`."""
    flags: list[tuple[str, list[str]]] = []
    for word in arguments:
        if word.startswith("-"):
            flag, separator, value = word.partition("=")
            flags.append((flag.replace("_", "-"), [value] if separator else []))
        elif flags:
            flags[-1][1].append(word)
    return flags


def _parser(flag: str, value: str, known: dict[str, str]) -> str:
    if value not in known:
        raise NotApplicable(f"`{flag} {value}`: another format than {', '.join(sorted(known))}")
    return known[value]
