"""Makes engine requests of a body that asks for text: validate, tokenize, check against the model.

The kinds of bodies of `tasks.generate`. Runs in the workers of `process`. No I/O, no asyncio.
"""

import uuid

import msgspec

from conveyor_engine.errors import InvalidRequest, context_exceeded
from conveyor_engine.serving.preparing.jobs import ServedModel, parse_body, too_many
from conveyor_engine.serving.preparing.sampling_defaults import SamplingDefaults
from conveyor_engine.serving.preparing.schemas import ChatRequest, CompletionRequest, SamplingFields
from conveyor_engine.text.tokenizer import PROMPT_TAIL_TOKENS, Truncation, too_long
from conveyor_engine.wire.frames import encode_frame
from conveyor_engine.wire.messages import Add
from conveyor_engine.wire.request import EngineRequest, ModelFacts, SamplingParams
from conveyor_engine.wire.worker import Job

LOGPROBS_MAX = 4_000_000  # of one request: each takes 12 bytes until its answer is sent, and 60 in the answer
COMPLETION_MAX_TOKENS = 16  # OpenAI's default


class PreparedChoice(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What the API process needs of an engine request to show its answer."""

    request_id: str
    arrival_time: float
    num_prompt_tokens: int
    prompt_tail: list[int]  # its last tokens
    max_tokens: int
    min_tokens: int


class PreparedText(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An admissible request. `choices` holds prompt 0's, then prompt 1's, and so on."""

    id: str
    stream: bool
    include_usage: bool  # at the end of a stream ...
    continuous_usage: bool  # ... and in each of its chunks
    stop: tuple[str, ...]
    top_logprobs: int | None  # alternatives per token; None = no log probabilities at all
    choices: list[PreparedChoice]
    choices_per_prompt: int
    num_prompt_tokens: int  # each prompt once
    tells_cached_tokens: bool
    ignored_fields: int
    add: bytes  # the message for the engine, encoded: the API process never handles the tokens

    @property
    def num_tokens_of(self) -> dict[str, int]:
        """By the id of each engine request, the tokens of its prompt."""
        return {choice.request_id: choice.num_prompt_tokens for choice in self.choices}


def prepare_completion(model: ServedModel, job: Job) -> PreparedText:
    """Raises InvalidRequest or UnknownModel."""
    fields = parse_body(model, CompletionRequest, job.body)
    num_requests = len(fields.prompt) * fields.choices_per_prompt()
    if num_requests > job.num_requests_max:
        raise too_many("prompts x n", num_requests, job, "n")
    max_tokens = fields.max_tokens or COMPLETION_MAX_TOKENS
    truncation = fields.truncation(job.facts.max_model_len - max_tokens)
    prompts = [read_prompt(model, prompt, truncation, job.facts, "prompt") for prompt in fields.prompt]
    return _prepared(model, fields, prompts, max_tokens, fields.logprobs, job, "cmpl")


def prepare_chat(model: ServedModel, job: Job) -> PreparedText:
    """Raises InvalidRequest or UnknownModel."""
    fields = parse_body(model, ChatRequest, job.body)
    max_tokens = fields.max_completion_tokens or fields.max_tokens
    longest = job.facts.max_model_len
    truncation = fields.truncation(longest - (max_tokens or 1))
    messages = fields.messages_for_template()
    prompt = model.tokenizer.encode_chat(messages, longest, fields.chat_template_kwargs, truncation)
    return _prepared(model, fields, [prompt], max_tokens, fields.top_logprobs_wanted(), job, "chatcmpl")


def read_prompt(
    model: ServedModel, prompt: str | list[int], truncation: Truncation | None, facts: ModelFacts, param: str
) -> list[int]:
    """The prompt's tokens, cut as the client wants it. Raises InvalidRequest, which names the field `param`."""
    if isinstance(prompt, str):
        return model.tokenizer.encode(prompt, facts.max_model_len, param=param, truncation=truncation)
    return prompt if truncation is None else truncation.cut(prompt)


def _prepared(
    model: ServedModel, fields: SamplingFields, prompts: list[list[int]], max_tokens: int | None,
    top_logprobs: int | None, job: Job, id_prefix: str,
) -> PreparedText:  # fmt: skip
    """Engine requests of all prompts and choices. `max_tokens` None: what the context leaves. Raises InvalidRequest."""
    request_id = f"{id_prefix}-{uuid.uuid4().hex}"
    include_usage, continuous_usage = fields.stream_options.usage_wanted() if fields.stream_options else (False, False)
    requests: list[EngineRequest] = []
    choices: list[PreparedChoice] = []
    asked: list[SamplingParams] = []
    for prompt in prompts:
        params = _sampling_params(fields, model.sampling_defaults, job.facts, len(prompt), max_tokens, top_logprobs)
        _check_prompt(fields, prompt, params, job.facts)
        for choice in range(fields.choices_per_prompt()):
            asked.append(_for_choice(params, choice))
            request = EngineRequest(
                request_id=f"{request_id}-{len(requests)}",
                prompt_token_ids=prompt,
                params=asked[-1],
                level=job.find_level(fields.priority),
                deadline=job.deadline,
                arrival_time=job.arrival_time,
                cache_salt=fields.cache_salt,
            )
            requests.append(request)
            choices.append(_choice(request, asked[-1]))
    _check_logprobs(fields, asked)
    return PreparedText(
        id=request_id,
        stream=bool(fields.stream),
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        stop=fields.stop,
        top_logprobs=top_logprobs,
        choices=choices,
        choices_per_prompt=fields.choices_per_prompt(),
        num_prompt_tokens=sum(map(len, prompts)),
        tells_cached_tokens=fields.cache_salt is not None,
        ignored_fields=fields.ignored,
        add=encode_frame(Add.of(requests)),
    )


def _choice(request: EngineRequest, params: SamplingParams) -> PreparedChoice:
    return PreparedChoice(
        request_id=request.request_id,
        arrival_time=request.arrival_time,
        num_prompt_tokens=len(request.prompt_token_ids),
        prompt_tail=list(request.prompt_token_ids[-PROMPT_TAIL_TOKENS:]),
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
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
        stop=fields.stop,
        logprobs=top_logprobs,
    )


def _check_prompt(fields: SamplingFields, prompt: list[int], params: SamplingParams, facts: ModelFacts) -> None:
    check_token_ids(prompt, facts, fields.prompt_field)
    if any(token_id >= facts.vocab_size for token_id in params.stop_token_ids):
        raise InvalidRequest(f"stop_token_ids must be in 0..{facts.vocab_size - 1}", param="stop_token_ids")
    total = len(prompt) + params.max_tokens
    if total > facts.max_model_len:
        limit = fields.max_tokens_field()
        both = f"you requested {params.max_tokens} output tokens and your prompt contains {len(prompt)} input tokens"
        problem = f"{both}, for a total of {total} tokens. Shorten the prompt or lower {limit}."
        raise context_exceeded(facts.max_model_len, problem, param=limit)


def check_token_ids(prompt: list[int], facts: ModelFacts, param: str) -> None:
    """Raises InvalidRequest if there are none, or one that the model does not have."""
    if not prompt:
        raise InvalidRequest("the prompt is empty; send at least one token", param=param)
    if max(prompt) >= facts.vocab_size:
        raise InvalidRequest(f"prompt token ids must be in 0..{facts.vocab_size - 1}", param=param)


def _check_logprobs(fields: SamplingFields, params: list[SamplingParams]) -> None:
    total = sum(p.max_tokens * (p.logprobs + 1) for p in params if p.logprobs is not None)
    if total > LOGPROBS_MAX:
        most = f"{fields.max_tokens_field()} x (alternatives + 1), over all choices, is {total}"
        raise InvalidRequest(
            f"logprobs asks for too many log probabilities: {most}, more than {LOGPROBS_MAX}; lower one of them, or n",
            param="logprobs",
        )


def _for_choice(params: SamplingParams, choice: int) -> SamplingParams:
    """The same parameters, with a seed of the choice's own."""
    if params.seed is None or choice == 0:
        return params
    seed = (params.seed + choice + 2**63) % 2**64 - 2**63
    return msgspec.structs.replace(params, seed=seed)
