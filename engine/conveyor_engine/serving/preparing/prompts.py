"""What bodies of one or more prompts have in common that each take one step of the engine. Used by tasks."""

import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import msgspec

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.serving.preparing.jobs import ServedModel
from conveyor_engine.serving.preparing.prepare import check_token_ids, read_prompt
from conveyor_engine.serving.preparing.schemas import ModelFields
from conveyor_engine.text.tokenizer import Truncation, too_long
from conveyor_engine.wire.request import EngineRequest, ModelFacts
from conveyor_engine.wire.worker import Job, Part

RESULT_BYTES_MAX = 64 << 20  # of one request, float32: half of what the API process holds for all of its clients


class Prompt(NamedTuple):
    """What one engine request computes."""

    token_ids: list[int]
    payload: bytes = b""
    payload_cost: int = 0
    payload_tokens: int = 0  # that `usage` counts beside the prompt's


class PreparedPrompts(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An admissible request, in the prompts' order."""

    id: str
    request_ids: list[str]
    nums_prompt_tokens: list[int]
    arrival_time: float
    ignored_fields: int
    param: str  # the field that has the inputs
    parts: list[Part]  # of a batch each: a long list never fills the engine's queue

    @classmethod
    def of(cls, prefix: str, prompts: Sequence[Prompt], job: Job, fields: ModelFields, param: str, **own: Any) -> Self:
        """Makes an engine request of each prompt of the body. `own`: what a subclass adds."""
        request_id = f"{prefix}-{uuid.uuid4().hex}"
        requests = [
            EngineRequest(
                request_id=f"{request_id}-{number}",
                party=request_id,
                prompt_token_ids=prompt.token_ids,
                payload=prompt.payload,
                payload_cost=prompt.payload_cost,
                level=job.find_level(fields.priority),
                deadline=job.deadline,
                arrival_time=job.arrival_time,
            )
            for number, prompt in enumerate(prompts)
        ]
        return cls(
            id=request_id,
            request_ids=[request.request_id for request in requests],
            nums_prompt_tokens=[len(prompt.token_ids) + prompt.payload_tokens for prompt in prompts],
            arrival_time=job.arrival_time,
            ignored_fields=fields.ignored,
            param=param,
            parts=Part.split(requests, job.facts.max_num_seqs),
            **own,
        )


def read_input(
    model: ServedModel,
    text: str | list[int],
    truncation: Truncation | None,
    facts: ModelFacts,
    param: str,
    *,
    add_special_tokens: bool = True,
) -> list[int]:
    """The input's tokens; a text's with those that the model's tokenizer puts around it. Raises InvalidRequest."""
    prompt = read_prompt(model, text, truncation, facts, param, add_special_tokens=add_special_tokens)
    check_input(prompt, facts, param)
    return prompt


def check_input(prompt: list[int], facts: ModelFacts, param: str) -> None:
    """Raises InvalidRequest for tokens that the model does not have, or more than it takes."""
    check_token_ids(prompt, facts, param)
    if len(prompt) > facts.max_model_len:
        raise too_long(len(prompt), facts.max_model_len, param)


def check_answer_size(num_inputs: int, size: int, of_what: str, param: str) -> None:
    """Refuses more results, of `size` numbers each, than one answer may hold, before they are computed."""
    most = RESULT_BYTES_MAX // (4 * size)
    if num_inputs > most:
        message = f"{num_inputs} inputs are more than the {most} that one answer may have with {size} {of_what}"
        raise InvalidRequest(f"{message}; send fewer at a time", param=param)
