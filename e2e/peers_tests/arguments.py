"""Translates arguments of `vllm serve` to settings of the engine. Used by `plugin`. Imports neither program."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# vLLM's flags with an equivalent flag of the engine, which has the same value.
_SAME = {
    "--max-model-len": "--max-model-len",
    "--max-num-seqs": "--max-num-seqs",
    "--served-model-name": "--served-model-name",
    "--host": "--host",
    "--port": "--port",
}
_MARKS = {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}  # the engine finds them in the template
_TOOL_PARSERS = {"hermes": "hermes", "llama3_json": "llama3_json", "mistral": "mistral"}
_REASONING_PARSERS = {"qwen3": "think", "deepseek_r1": "think", "mistral": "mistral"}
# Flags that change how vLLM computes, or that enable what the engine always has. They do not change our answers.
_WITHOUT_EFFECT = {
    "--enforce-eager", "--dtype", "--gpu-memory-utilization", "--seed", "--runner", "--enable-auto-tool-choice",
    "--structured-outputs-config.backend", "--enable-prompt-tokens-details", "--enable-chunked-prefill",
    "--trust-remote-code", "--max-num-batched-tokens", "--tokenizer-mode",
    "--config-format", "--ignore-patterns", "--enable-prefix-caching", "--load-format", "--no-async-scheduling",
    "--enable-server-load-tracking", "--show-hidden-metrics-for-version", "--enable-tokenizer-info-endpoint",
    "--skip-tokenizer-init", "--max-logprobs", "--enable-request-id-headers",
    "--enable-lora", "--max-lora-rank", "--max-cpu-loras",
}  # fmt: skip
# Flags for features that the engine lacks. Tests of the feature are not applicable (`files` names them); other tests of
# the same file run.
_LEFT_OUT = {
    "--enable-per-request-metrics",  # times of a request in its response
}  # fmt: skip
_MISSING = {
    "--uds": "unix sockets",
    "--api-key": "keys, which a proxy in front of the gateway checks",
    "--root-path": "a prefix for all paths",
    "--pooler-config": "texts in chunks",
    "--pooler-config.task": "vectors or labels of each token on /pooling",
    "--enable-force-include-usage": "usage in every answer",
    "--return-tokens-as-token-ids": "tokens as ids by default",
    "--watermark-config": "watermarks",
    "--speculative-config": "speculative decoding",
    "--enable-prompt-embeds": "prompts that are tensors",
    "--tool-server": "tools that the server runs",
}


class NotApplicable(Exception):
    """The engine cannot be started with the arguments of a test. The message names the missing feature."""


@dataclass(slots=True)
class Arguments:
    """The command line of the engine, without the model."""

    settings: list[str] = field(default_factory=list)
    chat_template: str | None = None  # the text of a template that replaces the model's own
    config: dict[str, Any] = field(default_factory=dict)  # fields to add to the model's config.json


def translate(arguments: Sequence[str]) -> Arguments:
    """Translate the arguments. Raises NotApplicable for features that the engine lacks, ValueError for unknown
    arguments."""
    translated = Arguments()
    parsers = {"--tool-parser": "none", "--reasoning-parser": "none"}  # vLLM's defaults
    for flag, values in _split(arguments):
        value = values[0] if values else ""
        if flag in _MISSING:
            raise NotApplicable(f"`{flag}`: {_MISSING[flag]}")
        if flag in _SAME:
            translated.settings += [_SAME[flag], value]
        elif flag == "--no-enable-prefix-caching":
            translated.settings += ["--prefix-caching", "false"]
        elif flag == "--lora-modules":
            translated.settings += ["--adapters", ",".join(values)]
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
    """Return each flag with its values, given as `--flag value...` or `--flag=value`."""
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
