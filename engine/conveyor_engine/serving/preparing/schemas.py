"""Schemas of request fields that have an effect, with OpenAI's and vLLM's names. `fields` has those without an effect.

This module has the fields of all requests and those that all requests for text share. `completion_schemas`,
`chat_schemas`, `inputs` and the tasks have the rest. An invalid value is an error that names the field. Null is the
same as an absent field. A field that no API defines is ignored. `ModelFields.ignored` counts such fields at the top
level of a request, and those that ask for more than the engine does. Pure.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.serving.preparing.costly_forms import FORM_FIELDS
from conveyor_engine.serving.preparing.fields import ROWS, Place, Row
from conveyor_engine.serving.preparing.structured import (
    Choice,
    Form,
    Grammar,
    Regex,
    ResponseFormat,
    Schema,
    StructuredOutputs,
)
from conveyor_engine.serving.preparing.values import (
    INTEGRAL,
    Alternatives,
    BadWord,
    ListedTokens,
    LogitBias,
    NamedTokens,
    Stops,
    TokenId,
)
from conveyor_engine.text.tokenizer import Side, Truncation
from conveyor_protocol.request_headers import LEVEL_MAX

CHOICES_MAX = 128
CACHE_SALT_CHARACTERS_MAX = 1024
BAD_WORDS_MAX = 128


class Object(BaseModel):
    """An object of the API. It has its own fields and those that `fields` accepts; all other fields are ignored."""

    model_config = ConfigDict(extra="allow", strict=True, use_attribute_docstrings=True)
    place: ClassVar[Place | None] = None

    @classmethod
    def rows(cls) -> Mapping[str, Row]:
        """Return the rows of `fields` for this object, by the field's name."""
        return {} if cls.place is None else ROWS[cls.place]

    @model_validator(mode="after")
    def _check_others(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            row = self.rows().get(name)
            if row is not None and (refusal := row.refusal(value)):
                error = InitErrorDetails(type=PydanticCustomError("unsupported", refusal), loc=(name,), input=value)
                raise ValidationError.from_exception_data(type(self).__name__, [error])
        return self


class StreamOptions(Object):
    """Which token counts a stream contains."""

    place = Place.STREAM_OPTIONS

    include_usage: bool | None = None
    """True: a last chunk has the token counts of the whole answer."""
    continuous_usage_stats: bool | None = None
    """True: each chunk has the token counts of its choice so far, and a last chunk has the totals. No effect if
    `include_usage` is false."""

    def usage_wanted(self) -> tuple[bool, bool]:
        """Return whether usage is sent at the end, and whether in each chunk.

        As in vLLM, usage is sent in each chunk only if it is also sent at the end.
        """
        each = bool(self.continuous_usage_stats)
        at_end = each if self.include_usage is None else self.include_usage
        return at_end, at_end and each


class ModelFields(Object):
    """The fields that every request has."""

    model: str | None = None
    """The served name."""
    priority: Annotated[int, Field(ge=0, le=LEVEL_MAX), INTEGRAL] | None = None
    """The request's level: lower levels run first. A gateway's `X-Request-Level` takes precedence."""

    @property
    def ignored(self) -> int:
        """Number of the request's fields that no API defines, or that ask for something that the engine leaves out."""
        rows = self.rows()
        return sum(name not in rows or rows[name].counts(value) for name, value in (self.model_extra or {}).items())


class PromptFields(ModelFields):
    """The fields that every request with text or tokens has."""

    truncates: ClassVar[Side]  # the side that is cut by default

    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31), INTEGRAL] | None = None
    """Cut each prompt to this number of tokens; -1: to as many tokens as the model's context leaves for it."""
    truncation_side: Side | None = None
    """The side on which prompts are cut; default: `right` for inputs to embed, rank or classify, otherwise `left`."""

    def truncation(self, room: int) -> Truncation | None:
        """Return how prompts are truncated if each may have `room` tokens; None: they are not.

        If `room` is less than 1, every prompt is too long, so none is truncated. Raises InvalidRequest.
        """
        wanted = self.truncate_prompt_tokens
        if wanted is None or room < 1:
            return None
        if wanted > room:
            most = f"must be at most {room}, the tokens that this model's context leaves for the prompt"
            message = f"truncate_prompt_tokens {most}, not {wanted}. Please request a smaller truncation size."
            raise InvalidRequest(message, param="truncate_prompt_tokens")
        return Truncation(room if wanted < 0 else wanted, self.truncation_side or self.truncates)


class ChoosingFields(PromptFields):
    """The fields of all requests for text that say how tokens are chosen, and which tokens may be chosen."""

    truncates = "left"

    stream: bool | None = False
    """Whether to send the answer as server-sent events."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """Higher values make the answer more random; 0 always takes the likeliest token."""
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Choose only among the likeliest tokens that together have this probability; 0: always the likeliest."""
    top_k: Annotated[int, Field(ge=-1, lt=2**31), INTEGRAL] | None = None
    """Choose only among this number of likeliest tokens; 0 and -1: among all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Choose only tokens with at least this share of the likeliest token's probability."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = 0
    """Subtracted from the logit of each token that the answer already has."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = 0
    """Subtracted from a token's logit, once for each time that the token is in the answer."""
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    """Divides the positive logits, and multiplies the negative logits, of all tokens of prompt and answer."""
    logit_bias: LogitBias = ()
    """Up to 1,024 token ids, each with a number from -100 to 100 that is added to its logit."""
    allowed_token_ids: ListedTokens | None = None
    """Up to 1,024 tokens; the answer contains no others."""
    bad_words: Annotated[list[BadWord], Field(max_length=BAD_WORDS_MAX, fail_fast=True)] | None = None
    """Up to 128 texts, of at most 16 tokens each, that the answer never contains."""
    structured_outputs: StructuredOutputs = None
    """The answer's format: one of `json` (a schema), `regex`, `choice`, `grammar` (Lark or GBNF), `structural_tag` and
    `json_object`."""
    guided_json: Schema = None
    """Same as `structured_outputs.json`."""
    guided_regex: Regex = None
    """Same as `structured_outputs.regex`."""
    guided_choice: Choice = None
    """Same as `structured_outputs.choice`."""
    guided_grammar: Grammar = None
    """Same as `structured_outputs.grammar`."""
    json_schema: Schema = None
    """Same as `structured_outputs.json`."""
    regex: Regex = None
    """Same as `structured_outputs.regex`."""
    ebnf: Grammar = None
    """Same as `structured_outputs.grammar`."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64), INTEGRAL] | None = None
    """Makes random answers repeatable."""
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128, fail_fast=True)] | None = None
    """Up to 128 tokens that end the answer."""
    include_stop_str_in_output: bool | None = False
    """True: the answer includes the stop string or token that ended it."""
    skip_special_tokens: bool | None = None
    """False: the text includes special tokens."""
    min_tokens: Annotated[int, Field(ge=0, lt=2**31), INTEGRAL] | None = 0
    """The answer has at least this number of tokens."""
    ignore_eos: bool | None = False
    """True: the answer does not end at the model's end-of-sequence token."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=CACHE_SALT_CHARACTERS_MAX)] | None = None
    """Share cached prefixes only with requests of the same salt; `usage` then has the number of cached tokens."""

    @model_validator(mode="after")
    def _check_forms(self) -> Self:
        if len(forms := self.forms()) > 1:
            *_, last = forms
            raise PydanticCustomError(last, f"{' and '.join(forms)} exclude each other; send one")
        return self

    def forms(self) -> dict[str, Form]:
        """Return the form that the answer must have, by the name of the field that requires it; at most one."""
        return {name: form for name in FORM_FIELDS if (form := getattr(self, name)) is not None}


class SamplingFields(ChoosingFields):
    """The fields that completions and chat share."""

    prompt_field: ClassVar[str]  # the name of the field with the prompt

    stream_options: StreamOptions | None = None
    """Only for streams."""
    n: Annotated[int, Field(ge=1, le=CHOICES_MAX), INTEGRAL] | None = 1
    """Number of choices for each prompt."""
    response_format: ResponseFormat = None
    """The answer's format. `type` is `text`, `json_object`, `json_schema` (with a `json_schema.schema` that the answer
    follows) or `structural_tag`."""
    max_tokens: Annotated[int, Field(ge=1, lt=2**31), INTEGRAL] | None = None
    """Maximum number of tokens of the answer; default: 16 for completions, as many as the context leaves for chats."""
    stop: Stops = ()
    """Up to 16 strings, of at most 1,024 characters each, that end the answer and are not part of it."""
    logprob_token_ids: NamedTokens | None = None
    """Up to 128 tokens whose log probabilities are returned, instead of those of the likeliest tokens."""
    prompt_logprobs: Alternatives | None = None
    """Return log probabilities of the prompt's tokens from the second on, with this many alternatives for each. Not in
    streams."""
    return_tokens_as_token_ids: bool | None = False
    """True: log probabilities write tokens as `token_id:5`."""
    return_token_ids: bool | None = False
    """True: return the ids of all tokens, as `prompt_token_ids` and `token_ids`."""

    @model_validator(mode="after")
    def _check_together(self) -> "SamplingFields":
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options is only allowed when stream is true")
        if self.logprob_token_ids and self.top_logprobs_wanted() is None:
            raise PydanticCustomError("logprob_token_ids", "logprob_token_ids is only allowed together with logprobs")
        if self.prompt_logprobs is not None and self.stream:
            raise PydanticCustomError("prompt_logprobs", "prompt_logprobs is only allowed when stream is false")
        return self

    def top_logprobs_wanted(self) -> int | None:
        """Return the number of alternatives for each token; None: the response has no log probabilities."""
        raise NotImplementedError

    def prompt_logprobs_wanted(self) -> int | None:
        """Return the number of alternatives for each token of the prompt; None: no log probabilities for these."""
        return self.prompt_logprobs

    def forms(self) -> dict[str, Form]:
        """Return the form, which `response_format` can require too."""
        own = {} if self.response_format is None else {"response_format": self.response_format}
        return own | super().forms()

    @property
    def shows_prompt(self) -> bool:
        """Whether the answer begins with the prompt."""
        return False

    def choices_per_prompt(self) -> int:
        """Return the number of choices for each prompt, `n`."""
        return self.n or 1

    def max_tokens_field(self) -> str:
        """Return the name of the field that limits the answer."""
        return "max_tokens"
