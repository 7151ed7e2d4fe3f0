"""From a request's bytes to engine requests: validate, tokenize, check against the model. Runs in a thread.

Used by `completions` and `chat`, which differ only in how they get the prompts. No I/O, no asyncio.
"""

import uuid
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from pydantic import ValidationError

from conveyor_engine.api.edge import Edge, check_model
from conveyor_engine.api.failures import invalid_request
from conveyor_engine.api.sampling_defaults import SamplingDefaults
from conveyor_engine.api.schemas import SamplingFields
from conveyor_engine.errors import InvalidRequest, Unavailable
from conveyor_engine.request import EngineRequest, ModelFacts, SamplingParams
from conveyor_engine.tokenizer import too_long

Fields = TypeVar("Fields", bound=SamplingFields)


@dataclass(frozen=True, slots=True)
class Prepared:
    """An admissible request. `requests` holds prompt 0's choices, then prompt 1's, and so on."""

    id: str
    stream: bool
    include_usage: bool  # at the end of a stream ...
    continuous_usage: bool  # ... and in each of its chunks
    stop: tuple[str, ...]
    requests: list[EngineRequest]
    choices_per_prompt: int
    num_prompt_tokens: int  # each prompt once


def parse_body(edge: Edge, schema: type[Fields], body: bytes) -> Fields:
    """The validated fields. Raises InvalidRequest or UnknownModel."""
    try:
        fields = schema.model_validate_json(body)
    except ValidationError as error:
        raise invalid_request(error) from None
    if fields.model is not None:
        check_model(edge, fields.model)
    return fields


def model_facts(edge: Edge) -> ModelFacts:
    """What is known since the model was loaded. Raises Unavailable before that."""
    if edge.engine.facts is None:
        raise Unavailable("the engine is starting")
    return edge.engine.facts


def prepare(
    edge: Edge, fields: SamplingFields, prompts: list[list[int]], *, max_tokens: int | None, top_logprobs: int | None,
    arrival: float, id_prefix: str,
) -> Prepared:  # fmt: skip
    """Engine requests for every prompt and choice; `max_tokens` None = what the context leaves. InvalidRequest."""
    facts = model_facts(edge)
    request_id = f"{id_prefix}-{uuid.uuid4().hex}"
    include_usage, continuous_usage = fields.stream_options.usage_wanted() if fields.stream_options else (False, False)
    requests: list[EngineRequest] = []
    for prompt in prompts:
        params = _sampling_params(fields, edge.sampling_defaults, facts, len(prompt), max_tokens, top_logprobs)
        _check_prompt(fields, prompt, params, facts)
        for choice in range(fields.choices_per_prompt()):
            requests.append(
                EngineRequest(
                    request_id=f"{request_id}-{len(requests)}",
                    prompt_token_ids=prompt,
                    sampling_params=_for_choice(params, choice),
                    arrival_time=arrival,
                )
            )
    return Prepared(
        id=request_id,
        stream=bool(fields.stream),
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        stop=fields.stop,
        requests=requests,
        choices_per_prompt=fields.choices_per_prompt(),
        num_prompt_tokens=sum(map(len, prompts)),
    )


def _sampling_params(
    fields: SamplingFields, defaults: SamplingDefaults, facts: ModelFacts, num_prompt_tokens: int,
    max_tokens: int | None, top_logprobs: int | None,
) -> SamplingParams:  # fmt: skip
    """Null means the default, as in OpenAI's API."""
    room = facts.max_model_len - num_prompt_tokens
    if room < 1:
        raise too_long(num_prompt_tokens, facts.max_model_len, fields.prompt_field)
    wanted = room if max_tokens is None else max_tokens
    min_tokens = fields.min_tokens or 0
    if min_tokens > wanted:
        limit = fields.max_tokens_field()
        raise InvalidRequest(f"min_tokens is {min_tokens}, but {limit} is {wanted}", param="min_tokens")
    return SamplingParams(
        max_tokens=wanted,
        min_tokens=min_tokens,
        temperature=defaults.temperature if fields.temperature is None else fields.temperature,
        top_p=defaults.top_p if fields.top_p is None else fields.top_p,
        top_k=max(0, defaults.top_k if fields.top_k is None else fields.top_k),
        seed=fields.seed,
        ignore_eos=bool(fields.ignore_eos),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        logprobs=top_logprobs,
    )


def _check_prompt(fields: SamplingFields, prompt: list[int], params: SamplingParams, facts: ModelFacts) -> None:
    if not prompt:
        raise InvalidRequest("the prompt is empty; send at least one token", param=fields.prompt_field)
    if max(prompt) >= facts.vocab_size:
        raise InvalidRequest(f"prompt token ids must be in 0..{facts.vocab_size - 1}", param=fields.prompt_field)
    if any(token_id >= facts.vocab_size for token_id in params.stop_token_ids):
        raise InvalidRequest(f"stop_token_ids must be in 0..{facts.vocab_size - 1}", param="stop_token_ids")
    total = len(prompt) + params.max_tokens
    if total > facts.max_model_len:
        limit = fields.max_tokens_field()
        raise InvalidRequest(
            f"the prompt has {len(prompt)} tokens and {limit} is {params.max_tokens}: together {total}, more than "
            f"the {facts.max_model_len} tokens of this model's context; shorten the prompt or lower {limit}",
            param=limit,
            code="context_length_exceeded",
        )


def _for_choice(params: SamplingParams, choice: int) -> SamplingParams:
    """The same, with a random stream of its own."""
    if params.seed is None or choice == 0:
        return params
    seed = (params.seed + choice + 2**63) % 2**64 - 2**63
    return msgspec.structs.replace(params, seed=seed)
