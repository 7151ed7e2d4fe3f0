"""Prepares text generation: validates and tokenizes bodies, checks them against the model, makes engine requests.

Used by the other modules here. Runs in the workers of `process`. No I/O, no asyncio.
"""

import uuid
from array import array
from collections.abc import Sequence
from functools import partial

import msgspec

from conveyor_engine.errors import InvalidRequest, context_exceeded
from conveyor_engine.serving.preparing.bounds import check_listed_tokens, check_logprobs, check_token_ids
from conveyor_engine.serving.preparing.chat_schemas import ChatRequest
from conveyor_engine.serving.preparing.completion_schemas import CompletionRequest
from conveyor_engine.serving.preparing.conversations import read_conversation
from conveyor_engine.serving.preparing.jobs import ServedModel, parse_body, too_many
from conveyor_engine.serving.preparing.prompts import read_prompt
from conveyor_engine.serving.preparing.sampling_defaults import SamplingDefaults
from conveyor_engine.serving.preparing.schemas import SamplingFields
from conveyor_engine.serving.preparing.structured import build_form_grammar
from conveyor_engine.serving.preparing.tool_use import CalledAs, add_channels
from conveyor_engine.serving.preparing.values import BAD_WORD_CHARACTERS_MAX
from conveyor_engine.text.detokenizer import Detokenizer
from conveyor_engine.text.grammar import NO_GRAMMAR, BuiltGrammar
from conveyor_engine.text.parsing.build import NO_PARSING, Parsing
from conveyor_engine.text.parsing.dialect import Dialect
from conveyor_engine.text.parsing.thinking import GPT_OSS, MARKS
from conveyor_engine.text.schema.problems import Relaxed
from conveyor_engine.text.tokenizer import PROMPT_TAIL_TOKENS, Truncation, too_long
from conveyor_engine.wire.pictures import PlacedPicture, encode_pictures
from conveyor_engine.wire.request import EngineRequest, ModelFacts, SamplingParams, Thinking
from conveyor_engine.wire.worker import Job, Part

COMPLETION_MAX_TOKENS = 16  # OpenAI's default
BAD_WORD_TOKENS_MAX = 16
_BAD_WORD_TOKENS_TRIED = 4 * BAD_WORD_CHARACTERS_MAX  # more tokens than any bad word has


class PreparedChoice(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What the API process must know about an engine request to write its response."""

    request_id: str
    arrival_time: float
    num_prompt_tokens: int
    prompt_tail: list[int]  # the prompt's last tokens
    max_tokens: int
    min_tokens: int
    shows_stop: bool = False  # the text includes the stop string or token that ended it
    skip_special_tokens: bool = True
    with_token_ids: bool = False  # return token ids in addition to the text


class Echo(msgspec.Struct, frozen=True, array_like=True):
    """A prompt as the response repeats it."""

    text: str
    packed_token_ids: bytes  # uint32 each
    packed_starts: bytes  # uint32 each: the offset in `text` at which each token begins


class PreparedText(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A valid request. `choices` contains the choices for prompt 0, then those for prompt 1, and so on."""

    id: str
    model: str  # the name that the request used, or the served name
    stream: bool
    include_usage: bool  # at the end of a stream
    continuous_usage: bool  # in each chunk of a stream too
    stop: tuple[str, ...]
    top_logprobs: int | None  # alternatives for each token; None: the response has no log probabilities
    choices: list[PreparedChoice]
    choices_per_prompt: int
    num_prompt_tokens: int  # each prompt is counted once
    reports_cached_tokens: bool
    reports_prediction: bool = False
    ignored_fields: int
    parts: list[Part]  # one part, because all choices begin together
    tokens_as_ids: bool = False  # whether log probabilities name tokens by their ids
    names_alternatives: bool = False  # whether the request lists the tokens whose log probabilities are returned
    prompt_token_ids: list[bytes] = []  # each prompt's ids, as uint32; empty if the response has no prompt ids
    echoes: list[Echo] = []  # for each prompt; empty if the response does not repeat prompts
    shows_only_prompt: bool = False
    reports_prompt_logprobs: bool = False
    parsing: Parsing = NO_PARSING
    called_as: dict[str, CalledAs] = {}  # how the client knows functions that are not its own
    hides_reasoning: bool = False  # the response omits the model's thinking
    continued_text: str = ""  # text that the response repeats before its own
    relaxed: list[Relaxed] = []  # keywords of schemas that the answer might not follow
    repeated: bytes = b""  # JSON of the request's fields that the response repeats


def prepare_completion(model: ServedModel, job: Job) -> PreparedText:
    """Prepare a body of /v1/completions. Raises InvalidRequest or UnknownModel."""
    fields = parse_body(model, CompletionRequest, job.body)
    num_requests = len(fields.prompt) * fields.choices_per_prompt()
    if num_requests > job.num_requests_max:
        raise too_many("prompts x n", num_requests, job, "n")
    shows_only_prompt = fields.max_tokens == 0  # the engine samples one token, which the answer leaves out
    max_tokens = fields.max_tokens or (1 if shows_only_prompt else COMPLETION_MAX_TOKENS)
    truncation = fields.truncation(job.facts.max_model_len - max_tokens)
    prompts = [read_prompt(model, prompt, truncation, job.facts, "prompt") for prompt in fields.prompt]
    prepared = _prepared(model, fields, prompts, max_tokens, job, "cmpl-")
    return msgspec.structs.replace(prepared, shows_only_prompt=shows_only_prompt)


def prepare_chat(model: ServedModel, job: Job) -> PreparedText:
    """Prepare a body of /v1/chat/completions. Raises InvalidRequest or UnknownModel."""
    fields = parse_body(model, ChatRequest, job.body)
    is_ignored = fields.prediction is not None and not job.facts.speculates
    prepared = prepare_conversation(model, fields, job, "chatcmpl-", ignored_fields=fields.ignored + is_ignored)
    hides, continued = fields.include_reasoning is False, fields.continued_text()
    return msgspec.structs.replace(prepared, hides_reasoning=hides, continued_text=continued)


def prepare_conversation(
    model: ServedModel, fields: ChatRequest, job: Job, id_prefix: str, *, ignored_fields: int
) -> PreparedText:
    """Prepare a chat request. The chat, messages and responses APIs all use this. Raises InvalidRequest."""
    max_tokens = fields.max_completion_tokens or fields.max_tokens
    longest = job.facts.max_model_len
    truncation = fields.truncation(longest - (max_tokens or 1))
    conversation = read_conversation(model, fields, job.facts, truncation)
    use = fields.tool_use
    num_calls = sum(len(message.get("tool_calls", ())) for message in fields.messages_for_template())
    parsing = _find_thinking(model.dialect, conversation.text, use.find_parsing(model.dialect, num_calls))
    find_token = partial(_find_token, model, facts=job.facts)
    grammar = use.build_grammar(model.dialect, find_token)
    if not grammar.text and fields.response_format and fields.response_format.kind != "tags":
        form = build_form_grammar(fields.response_format, "response_format", find_token)
        grammar = use.add_calls(form, model.dialect, find_token, has_channels=parsing.thinking == GPT_OSS)
    budget = None if fields.thinking_token_budget == -1 else fields.thinking_token_budget
    prompts, pictures = [conversation.token_ids], conversation.pictures
    prediction: list[int] = []
    if fields.prediction is not None and job.facts.speculates:
        beginning = Truncation(longest, "right")
        prediction = model.tokenizer.encode(
            fields.prediction.content, longest, add_special_tokens=False, truncation=beginning
        )
    prepared = _prepared(
        model, fields, prompts, max_tokens, job, id_prefix, grammar, parsing, budget, pictures, prediction
    )
    return msgspec.structs.replace(prepared, ignored_fields=ignored_fields, called_as=use.called_as)


def _find_thinking(dialect: Dialect, text: str, parsing: Parsing) -> Parsing:
    """Return `parsing`, set to parse thinking if the answer to this prompt can contain any.

    If the prompt ends with the mark that ends thinking, the answer contains none. If it ends with the mark that begins
    thinking, the answer starts inside it. A model whose thinking begins a message thinks only if the prompt says so.
    """
    if dialect.thinking is None:
        return parsing
    marks, end = MARKS[dialect.thinking], text.rstrip()
    if end.endswith(marks.end) or not end.endswith(marks.prompt_end):
        return parsing
    has_begun = end.endswith(marks.begin)
    return msgspec.structs.replace(parsing, thinking=dialect.thinking, has_begun_thinking=has_begun)


def _find_thinking_tokens(
    model: ServedModel, parsing: Parsing, facts: ModelFacts, budget: int | None
) -> Thinking | None:
    """Return the tokens that begin and end thinking; None if the answer has no thinking. Raises InvalidRequest.

    The engine can detect only marks that are single tokens. With longer marks, an answer that follows a grammar has no
    thinking, and a budget is rejected.
    """
    if not parsing.thinking:
        if budget is not None and model.dialect.thinking is None:
            raise _no_budget("this model's chat template shows no thinking")
        return None
    marks = MARKS[parsing.thinking]
    first = marks.first_token or marks.begin
    begin, end = model.tokenizer.find_id(first), model.tokenizer.find_id(marks.end)
    if begin is None or end is None or max(begin, end) >= facts.vocab_size:
        if budget is not None:
            raise _no_budget(f"{first} and {marks.end} are not single tokens of this model")
        return None
    return Thinking(begin, end, parsing.has_begun_thinking, budget)


def _find_token(model: ServedModel, mark: str, facts: ModelFacts) -> int | None:
    """Return the single token for the whole mark; None if there is none or the model cannot generate it."""
    token_id = model.tokenizer.find_id(mark)
    return None if token_id is None or token_id >= facts.vocab_size else token_id


def _no_budget(why: str) -> InvalidRequest:
    return InvalidRequest(f"thinking_token_budget is not supported: {why}", param="thinking_token_budget")


def _prepared(
    model: ServedModel,
    fields: SamplingFields,
    prompts: list[list[int]],
    max_tokens: int | None,
    job: Job,
    id_prefix: str,
    grammar: BuiltGrammar = NO_GRAMMAR,
    parsing: Parsing = NO_PARSING,
    budget: int | None = None,
    pictures: Sequence[PlacedPicture] = (),
    prediction: Sequence[int] = (),
) -> PreparedText:
    """Make engine requests for all prompts and choices. Raises InvalidRequest.

    max_tokens: None: as many tokens as the context leaves.
    """
    request_id = f"{id_prefix}{uuid.uuid4().hex}"
    include_usage, continuous_usage = fields.stream_options.usage_wanted() if fields.stream_options else (False, False)
    requests: list[EngineRequest] = []
    choices: list[PreparedChoice] = []
    all_params: list[SamplingParams] = []
    find_token = partial(_find_token, model, facts=job.facts)
    for field, form in fields.forms().items() if not grammar.text else ():
        grammar = build_form_grammar(form, field, find_token)
        if parsing.thinking == GPT_OSS:
            grammar = add_channels(grammar, (), find_token)
    thinking = _find_thinking_tokens(model, parsing, job.facts, budget) if grammar.text or budget is not None else None
    bad_words = _read_bad_words(model, fields.bad_words or ())
    check_listed_tokens(fields, bad_words, job.facts)
    adapter, payload = model.find_adapter(fields.model), encode_pictures(pictures)
    number = model.adapters[adapter].number if adapter else 0
    for prompt in prompts:
        params = _sampling_params(fields, model.sampling_defaults, job.facts, len(prompt), max_tokens)
        params = msgspec.structs.replace(params, bad_words=bad_words)
        if parsing.has_special_tokens:
            params = msgspec.structs.replace(params, skip_special_tokens=False)
        _check_prompt(fields, prompt, params, job.facts)
        for choice in range(fields.choices_per_prompt()):
            all_params.append(_for_choice(params, choice))
            request = EngineRequest(
                request_id=f"{request_id}-{len(requests)}",
                prompt_token_ids=prompt,
                params=all_params[-1],
                grammar=grammar.text,
                thinking=thinking,
                level=job.find_level(fields.priority),
                deadline=job.deadline,
                arrival_time=job.arrival_time,
                cache_salt=fields.cache_salt,
                adapter=number,
                prediction=prediction,
                payload=payload,
                pictures=[placed.span for placed in pictures],
            )
            requests.append(request)
            choices.append(_choice(request, all_params[-1], fields))
    is_scored = fields.prompt_logprobs_wanted() is not None
    check_logprobs(fields, all_params, fields.choices_per_prompt() * sum(map(len, prompts)) if is_scored else 0)
    return PreparedText(
        id=request_id,
        model=model.full_name(adapter),
        stream=bool(fields.stream),
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        stop=fields.stop,
        top_logprobs=fields.top_logprobs_wanted(),
        choices=choices,
        choices_per_prompt=fields.choices_per_prompt(),
        num_prompt_tokens=sum(map(len, prompts)),
        reports_cached_tokens=fields.cache_salt is not None,
        reports_prediction=bool(prediction),
        ignored_fields=fields.ignored,
        parts=[Part.of(requests, len(grammar.text))],
        tokens_as_ids=bool(fields.return_tokens_as_token_ids),
        names_alternatives=bool(fields.logprob_token_ids),
        prompt_token_ids=[array("I", prompt).tobytes() for prompt in prompts] if fields.return_token_ids else [],
        echoes=_echoes(model, fields, prompts),
        reports_prompt_logprobs=fields.prompt_logprobs is not None,
        parsing=parsing,
        relaxed=list(grammar.relaxed),
    )


def _echoes(model: ServedModel, fields: SamplingFields, prompts: list[list[int]]) -> list[Echo]:
    if not fields.shows_prompt:
        return []
    echoes = []
    for prompt in prompts:
        shown = Detokenizer(model.tokenizer, (), skip_special_tokens=fields.skip_special_tokens is not False)
        begin, end = shown.push(prompt), shown.finish()
        starts = array("I", begin.token_starts + end.token_starts)
        echoes.append(Echo(begin.text + end.text, array("I", prompt).tobytes(), starts.tobytes()))
    return echoes


def _choice(request: EngineRequest, params: SamplingParams, fields: SamplingFields) -> PreparedChoice:
    return PreparedChoice(
        request_id=request.request_id,
        arrival_time=request.arrival_time,
        num_prompt_tokens=len(request.prompt_token_ids),
        prompt_tail=list(request.prompt_token_ids[-PROMPT_TAIL_TOKENS:]),
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        shows_stop=bool(fields.include_stop_str_in_output),
        skip_special_tokens=params.skip_special_tokens,
        with_token_ids=bool(fields.return_token_ids),
    )


def _sampling_params(
    fields: SamplingFields, defaults: SamplingDefaults, facts: ModelFacts, num_prompt_tokens: int,
    max_tokens: int | None,
) -> SamplingParams:  # fmt: skip
    """Return the sampling parameters. Null means the default, as in OpenAI's API. Raises InvalidRequest."""
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
        min_p=defaults.min_p if fields.min_p is None else fields.min_p,
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=(
            defaults.repetition_penalty if fields.repetition_penalty is None else fields.repetition_penalty
        ),
        logit_bias=fields.logit_bias,
        allowed_token_ids=tuple(fields.allowed_token_ids or ()),
        seed=fields.seed,
        ignore_eos=bool(fields.ignore_eos),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        stop=fields.stop,
        skip_special_tokens=fields.skip_special_tokens is not False,
        logprobs=fields.top_logprobs_wanted(),
        logprob_token_ids=tuple(fields.logprob_token_ids or ()),
        prompt_logprobs=fields.prompt_logprobs_wanted(),
    )


def _check_prompt(fields: SamplingFields, prompt: list[int], params: SamplingParams, facts: ModelFacts) -> None:
    check_token_ids(prompt, facts, fields.prompt_field)
    total = len(prompt) + params.max_tokens
    if total > facts.max_model_len:
        limit = fields.max_tokens_field()
        both = f"you requested {params.max_tokens} output tokens and your prompt contains {len(prompt)} input tokens"
        problem = f"{both}, for a total of {total} tokens. Shorten the prompt or lower {limit}."
        raise context_exceeded(facts.max_model_len, problem, param=limit)


def _read_bad_words(model: ServedModel, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return each bad word's token ids at the beginning of a text and, if they differ, after a space, as vLLM does.

    Raises InvalidRequest for a word with too many tokens or none.
    """
    read: list[tuple[int, ...]] = []
    for number, word in enumerate(words):
        alone, within = (
            tuple(model.tokenizer.encode(text, _BAD_WORD_TOKENS_TRIED, add_special_tokens=False, param="bad_words"))
            for text in (word.lstrip(), f" {word.lstrip()}")
        )
        if not 0 < len(alone) <= BAD_WORD_TOKENS_MAX:
            most = f"must have 1 to {BAD_WORD_TOKENS_MAX} tokens"
            raise InvalidRequest(f"bad_words[{number}] {most}, not {len(alone)}", param="bad_words")
        read.append(alone)
        if len(within) == len(alone) and within[0] != alone[0]:
            read.append(within)
    return tuple(read)


def _for_choice(params: SamplingParams, choice: int) -> SamplingParams:
    """Return the parameters for choice number `choice`, which has its own seed."""
    if params.seed is None or choice == 0:
        return params
    seed = (params.seed + choice + 2**63) % 2**64 - 2**63
    return msgspec.structs.replace(params, seed=seed)
