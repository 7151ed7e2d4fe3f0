"""Reads the model's sampling defaults from its generation_config.json, as vLLM and SGLang do.

Called once, by `__main__`. Each default is validated like a client's value, and ignored if it is invalid.
"""

import json
import logging
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from conveyor_engine.model_files import read_object
from conveyor_engine.serving.preparing.completion_schemas import CompletionRequest
from conveyor_engine.serving.preparing.refusals import invalid_request

FILE = "generation_config.json"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Defaults of the sampling parameters for which vLLM and SGLang read a model's file.

    If the model's file has no value, the default is OpenAI's, or turns the parameter off.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def read_sampling_defaults(directory: Path) -> SamplingDefaults:
    """Read the model's defaults. Log those that apply, and why others are ignored. Raises ModelError."""
    content = read_object(directory / FILE)
    values: dict[str, Any] = {}
    for name in {field.name for field in fields(SamplingDefaults)} & content.keys():
        try:
            request = CompletionRequest.model_validate_json(json.dumps({"prompt": "-", name: content[name]}))
        except ValidationError as error:
            _log.warning("event=sampling_default_ignored file=%s reason=%s", FILE, invalid_request(error))
            continue
        if (value := getattr(request, name)) is not None:
            values[name] = value
    defaults = SamplingDefaults(**values)
    _log.info(
        "event=sampling_defaults temperature=%g top_p=%g top_k=%d min_p=%g repetition_penalty=%g",
        *asdict(defaults).values(),
    )
    return defaults
