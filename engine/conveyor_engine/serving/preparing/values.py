"""Types of fields that pydantic's own types do not describe, each with its parser and its JSON Schema.

Used by `schemas` and the other schema modules, which have the fields. Because a body may have millions of values, the
parsers avoid copying lists and stop at the first error. Pure.
"""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

STOP_STRINGS_MAX = 16
STOP_CHARACTERS_MAX = 1024
TOP_LOGPROBS_MAX = 20
LISTED_TOKENS_MAX = 1024  # in logit_bias and in allowed_token_ids
LOGIT_BIAS_MAX = 100
_NAMED_MAX = 3  # wrong entries that an error names
_NAMED_CHARACTERS_MAX = 40
NAMED_TOKENS_MAX = 128
BAD_WORD_CHARACTERS_MAX = 256


def _parse_stop(value: object) -> object:
    """Return a string, or a list of strings, as a tuple of strings."""
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return ()
    if not isinstance(stops, list) or not all(isinstance(s, str) and 0 < len(s) <= STOP_CHARACTERS_MAX for s in stops):
        raise PydanticCustomError(
            "stop", f"must be a string or a list of strings of 1 to {STOP_CHARACTERS_MAX} characters"
        )
    if len(stops) > STOP_STRINGS_MAX:
        raise PydanticCustomError("stop", f"must be at most {STOP_STRINGS_MAX} strings, not {len(stops)}")
    return tuple(stops)


def _parse_logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    """Return an object from token ids to biases as pairs (token id, bias)."""
    if value is None:
        return ()
    if isinstance(value, dict) and len(value) <= LISTED_TOKENS_MAX and all(map(_is_bias, value, value.values())):
        return tuple((int(token_id), float(bias)) for token_id, bias in value.items())
    bias = f"a number from -{LOGIT_BIAS_MAX} to {LOGIT_BIAS_MAX}"
    entries = value.items() if isinstance(value, dict) and len(value) <= LISTED_TOKENS_MAX else ()
    wrong = [name for name, each in entries if not _is_bias(name, each)][:_NAMED_MAX]
    named = ", ".join(repr(name[:_NAMED_CHARACTERS_MAX]).replace("{", "(").replace("}", ")") for name in wrong)
    more = f"; invalid: {named}" if wrong else ""
    raise PydanticCustomError(
        "logit_bias", f"must be an object of at most {LISTED_TOKENS_MAX} token ids, each with {bias}{more}"
    )


def _is_bias(token_id: str, bias: object) -> bool:
    is_id = token_id.isascii() and token_id.isdecimal() and len(token_id) <= 10 and int(token_id) < 2**31
    return is_id and isinstance(bias, int | float) and not isinstance(bias, bool) and abs(bias) <= LOGIT_BIAS_MAX


def _parse_prompt(value: object) -> list[Any]:
    """Return a list of strings or of lists of token ids.

    The value is a string, a list of strings, a list of token ids or a list of such lists.
    """
    if isinstance(value, str):
        return [value]
    if (ids := _read_ids(value)) is not None:
        return [ids]
    if isinstance(value, list) and value:
        if all(isinstance(prompt, str) for prompt in value):
            return value
        lists = list(map(_read_ids, value))
        if None not in lists:
            return lists
        if any(type(v) is int and v < 0 for v in value):
            raise PydanticCustomError("prompt", "has a negative token id, which is out of vocabulary")
    raise PydanticCustomError(
        "prompt", "must be a string, a list of strings, a list of token ids or a list of such lists, none of them empty"
    )


def parse_inputs(value: object) -> list[Any]:
    """Return a list as `_parse_prompt` does. Raises PydanticCustomError for an empty text, which has no vector."""
    inputs = _parse_prompt(value)
    if "" in inputs:
        raise PydanticCustomError("input", "must not be an empty text")
    return inputs


def _read_ids(value: object) -> list[object] | None:
    """Return the list of token ids; None if the value is not such a list."""
    if not isinstance(value, list) or not value:
        return None
    ids = value if all(type(v) is int for v in value) else list(map(_read_integer, value))
    return ids if all(type(v) is int and 0 <= v < 2**31 for v in ids) else None


def _refuse_all(value: object) -> object:
    """Raise PydanticCustomError for -1, which means the whole vocabulary in vLLM."""
    if value == -1:
        whole = "must not be -1: the whole vocabulary for each token is too much to send"
        raise PydanticCustomError("logprobs", f"{whole}; name the tokens in logprob_token_ids")
    return value


def _read_integer(value: object) -> object:
    """Return a float such as 5.0, which is an integer in JSON Schema, as an int."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def list_of(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


# JSON Schema of what the parsers above accept, which pydantic cannot derive.
_STOP: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": STOP_CHARACTERS_MAX}
_IDS = list_of({"type": "integer", "minimum": 0, "exclusiveMaximum": 2**31})

_BIASES: dict[str, Any] = {
    "type": "object",
    "maxProperties": LISTED_TOKENS_MAX,
    "propertyNames": {"pattern": r"^[0-9]{1,10}$"},
    "additionalProperties": {"type": "number", "minimum": -LOGIT_BIAS_MAX, "maximum": LOGIT_BIAS_MAX},
}

_TEXT = {"type": "string"}
_NOT_EMPTY = {"type": "string", "minLength": 1}

INPUTS_SCHEMA: dict[str, Any] = {"anyOf": [_NOT_EMPTY, list_of(_NOT_EMPTY), _IDS, list_of(_IDS)]}

_Prompts = list[str] | list[list[int]]
Prompts = Annotated[
    _Prompts,
    PlainValidator(_parse_prompt),
    WithJsonSchema({"anyOf": [_TEXT, list_of(_TEXT), _IDS, list_of(_IDS)]}),
]
Inputs = Annotated[
    _Prompts,
    PlainValidator(parse_inputs),
    WithJsonSchema(INPUTS_SCHEMA),
]
Stops = Annotated[
    tuple[str, ...],
    BeforeValidator(_parse_stop),
    WithJsonSchema(
        {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": STOP_STRINGS_MAX}, {"type": "null"}]}
    ),
]
LogitBias = Annotated[
    tuple[tuple[int, float], ...],
    PlainValidator(_parse_logit_bias),
    WithJsonSchema({"anyOf": [_BIASES, {"type": "null"}]}),
]
INTEGRAL = BeforeValidator(_read_integer)
TokenId = Annotated[int, Field(ge=0, lt=2**31), INTEGRAL]
ListedTokens = Annotated[list[TokenId], Field(min_length=1, max_length=LISTED_TOKENS_MAX, fail_fast=True)]
NamedTokens = Annotated[list[TokenId], Field(min_length=1, max_length=NAMED_TOKENS_MAX, fail_fast=True)]
Alternatives = Annotated[int, Field(ge=0, le=TOP_LOGPROBS_MAX), INTEGRAL, BeforeValidator(_refuse_all)]
BadWord = Annotated[str, Field(min_length=1, max_length=BAD_WORD_CHARACTERS_MAX)]
