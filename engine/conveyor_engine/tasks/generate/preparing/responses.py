"""Converts bodies of the Responses API to chat requests, so that both share template, tool parser and the rest.

Used by `tasks.generate` for one kind of body. Runs in the workers of `process`. No I/O, no asyncio.
"""

from typing import Any, Final, Literal

import msgspec

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.serving.preparing.chat_schemas import ChatRequest
from conveyor_engine.serving.preparing.jobs import ServedModel, parse_body
from conveyor_engine.serving.preparing.sampling_defaults import SamplingDefaults
from conveyor_engine.serving.preparing.schemas import ChoosingFields
from conveyor_engine.tasks.generate.preparing.prepare import PreparedText, prepare_conversation
from conveyor_engine.tasks.generate.preparing.responses_schemas import ResponsesRequest
from conveyor_engine.tasks.generate.preparing.translation import in_words_of
from conveyor_engine.wire.worker import Job

_WORDS: Final = {
    ".function.parameters": ".parameters", ".custom.format": ".format", "messages": "input",
    "max_completion_tokens": "max_output_tokens", "response_format": "text.format",
}  # fmt: skip
REPEATED_BYTES_MAX: Final = 2**19  # a stream contains this text three times
Json = dict[str, Any]


class Repeated(msgspec.Struct, kw_only=True):
    """The fields of the request that the response repeats, with the values that were used."""

    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    prompt_cache_key: str | None
    reasoning: Json
    safety_identifier: str | None
    temperature: float
    text: Json
    tool_choice: str | Json
    tools: list[Json]
    top_p: float
    user: str | None
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    background: Literal[False] = False
    max_tool_calls: None = None
    previous_response_id: None = None
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"


def prepare_response(model: ServedModel, job: Job) -> PreparedText:
    """Prepare a body of /v1/responses. Raises InvalidRequest or UnknownModel."""
    fields = parse_body(model, ResponsesRequest, job.body)
    chat = ChatRequest.model_construct(
        None,
        **{name: getattr(fields, name) for name in ChoosingFields.model_fields},
        messages=fields.conversation(),
        response_format=fields.text.form() if fields.text else None,
        max_completion_tokens=fields.max_output_tokens,
        logprobs=fields.includes_logprobs,
        top_logprobs=fields.top_logprobs,
        reasoning_effort=fields.reasoning.effort if fields.reasoning else None,
        thinking_token_budget=fields.thinking_token_budget,
        chat_template_kwargs=fields.chat_template_kwargs,
    )
    chat.tool_use = fields.tool_use  # validated with the body
    with in_words_of(_WORDS):
        prepared = prepare_conversation(model, chat, job, "resp_", ignored_fields=fields.ignored)
    repeated = msgspec.json.encode(_repeat(fields, model.sampling_defaults))
    if len(repeated) > REPEATED_BYTES_MAX:
        what = "instructions, tools and text.format, which the answer repeats, have"
        raise InvalidRequest(
            f"{what} {len(repeated)} bytes, more than {REPEATED_BYTES_MAX}; shorten them", param="instructions"
        )
    return msgspec.structs.replace(prepared, repeated=repeated)


def _repeat(fields: ResponsesRequest, defaults: SamplingDefaults) -> Repeated:
    tools = [tool.model_dump(exclude_unset=True) for tool in fields.tools or ()]
    choice = fields.tool_choice or "auto"
    form = fields.text.format.model_dump(by_alias=True) if fields.text and fields.text.format else {"type": "text"}
    effort = fields.reasoning.effort if fields.reasoning else None
    return Repeated(
        instructions=fields.instructions,
        max_output_tokens=fields.max_output_tokens,
        metadata=fields.metadata or {},
        parallel_tool_calls=fields.parallel_tool_calls is not False,
        prompt_cache_key=fields.prompt_cache_key,
        reasoning={"effort": effort, "summary": None},
        safety_identifier=fields.safety_identifier,
        temperature=defaults.temperature if fields.temperature is None else fields.temperature,
        text={"format": form, "verbosity": (fields.text and fields.text.verbosity) or "medium"},
        tool_choice=choice if isinstance(choice, str) else choice.model_dump(exclude_unset=True),
        tools=tools,
        top_p=defaults.top_p if fields.top_p is None else fields.top_p,
        user=fields.user,
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        top_logprobs=fields.top_logprobs or 0,
    )
