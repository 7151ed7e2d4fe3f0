"""Reads prompts and conversations of any task, and prepares bodies whose prompts each get one result. Used by tasks."""

import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import msgspec

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.serving.preparing.bounds import check_token_ids
from conveyor_engine.serving.preparing.jobs import ServedModel
from conveyor_engine.serving.preparing.schemas import ModelFields
from conveyor_engine.text.tokenizer import Truncation, too_long
from conveyor_engine.wire.request import EngineRequest, ModelFacts, SamplingParams
from conveyor_engine.wire.worker import Job, Part

RESULT_BYTES_MAX = 64 << 20  # limit on the results of a request: half of what the API process may hold for all clients


class Prompt(NamedTuple):
    """What one engine request computes."""

    token_ids: list[int]
    payload: bytes = b""
    payload_cost: int = 0
    payload_tokens: int = 0  # tokens of the payload; `usage` counts them as prompt tokens
    num_steps: int = 1  # number of engine steps in which the payload is computed
    group: int = 0  # see `EngineRequest`
    params: SamplingParams | None = None


class PreparedPrompts(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A valid request, in the order of its prompts."""

    id: str
    request_ids: list[str]
    nums_prompt_tokens: list[int]
    arrival_time: float
    ignored_fields: int
    param: str  # the field that has the inputs
    parts: list[Part]  # each has at most a batch of requests, so that a long list does not fill the engine's queue

    @classmethod
    def of(
        cls,
        prefix: str,
        prompts: Sequence[Prompt],
        job: Job,
        fields: ModelFields,
        param: str,
        part_size: int | None = None,
        **own: Any,
    ) -> Self:
        """Make an engine request for each prompt of the body.

        part_size: requests of a part; None: a batch. own: the fields that a subclass adds.
        """
        request_id = f"{prefix}-{uuid.uuid4().hex}"
        requests = [
            EngineRequest(
                request_id=f"{request_id}-{number}",
                party=request_id,
                prompt_token_ids=prompt.token_ids,
                payload=prompt.payload,
                payload_cost=prompt.payload_cost,
                num_steps=prompt.num_steps,
                group=prompt.group,
                params=prompt.params,
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
            parts=Part.split(requests, part_size or job.facts.max_num_seqs),
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
    """Return the token ids of an input. Raises InvalidRequest.

    add_special_tokens: whether the tokenizer adds its special tokens to a text.
    """
    prompt = read_prompt(model, text, truncation, facts, param, add_special_tokens=add_special_tokens)
    check_input(prompt, facts, param)
    return prompt


def check_input(prompt: list[int], facts: ModelFacts, param: str) -> None:
    """Raise InvalidRequest if the prompt is empty, too long, or has a token that the model does not have."""
    check_token_ids(prompt, facts, param)
    if len(prompt) > facts.max_model_len:
        raise too_long(len(prompt), facts.max_model_len, param)


def check_answer_size(number: int, size: int, of_what: str, param: str, counted: str = "inputs") -> None:
    """Raise InvalidRequest if the results, `number` times `size` float32 numbers, are too large for one response.

    Called before the results are computed. counted: what `number` counts.
    """
    most = RESULT_BYTES_MAX // (4 * size)
    if number > most:
        message = f"{number} {counted} are more than the {most} that one answer may have with {size} {of_what}"
        raise InvalidRequest(f"{message}; send fewer at a time", param=param)


def read_prompt(
    model: ServedModel,
    prompt: str | list[int],
    truncation: Truncation | None,
    facts: ModelFacts,
    param: str,
    *,
    add_special_tokens: bool = True,
) -> list[int]:
    """Return the prompt's token ids, truncated as requested. Raises InvalidRequest, which names the field `param`."""
    if isinstance(prompt, str):
        return model.tokenizer.encode(
            prompt, facts.max_model_len, add_special_tokens=add_special_tokens, param=param, truncation=truncation
        )
    return prompt if truncation is None else truncation.cut(prompt)
