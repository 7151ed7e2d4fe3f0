"""Reads the model's sampling defaults from its generation_config.json, as vLLM and SGLang do.

Called once, by `__main__`. A default is validated as if a client had sent it; one that would be refused is ignored.
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from conveyor_engine.model_files import read_object
from conveyor_engine.serving.preparing.refusals import invalid_request
from conveyor_engine.serving.preparing.schemas import CompletionRequest

FILE = "generation_config.json"
_NAMES = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}  # those that vLLM and SGLang apply
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """OpenAI's, unless the model has others."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


def read_sampling_defaults(directory: Path) -> SamplingDefaults:
    """The model's own. Logs those that apply, and each that does not with its reason. Raises ModelError."""
    content = read_object(directory / FILE)
    values: dict[str, Any] = {}
    for name in _NAMES & content.keys():
        try:
            fields = CompletionRequest.model_validate_json(json.dumps({"prompt": "-", name: content[name]}))
        except ValidationError as error:
            _log.warning("event=sampling_default_ignored file=%s reason=%s", FILE, invalid_request(error))
            continue
        if (value := getattr(fields, name)) is not None:
            values[name] = value
    defaults = SamplingDefaults(**{name: value for name, value in values.items() if name in SamplingDefaults.__slots__})
    _log.info(
        "event=sampling_defaults temperature=%g top_p=%g top_k=%d", defaults.temperature, defaults.top_p, defaults.top_k
    )
    return defaults
