"""Schemas of the bodies that request scores for pairs: Cohere's, Jina's, vLLM's and text-embeddings-inference's.

Used by `comparing`, for tasks whose models rerank or embed. Pure.
"""

from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.serving.preparing.fields import Place
from conveyor_engine.serving.preparing.schemas import PromptFields
from conveyor_engine.serving.preparing.tei import TeiScoreFields
from conveyor_engine.serving.preparing.values import INTEGRAL

INSTRUCTION_CHARACTERS_MAX: Final = 4096
Query = Annotated[str, Field(min_length=1)]

_TEXT = {"type": "string"}
_DOCUMENT = {"anyOf": [_TEXT, {"type": "object", "properties": {"text": _TEXT}, "required": ["text"]}]}


def _parse_documents(value: object) -> list[str]:
    """Return the texts of a list of texts or of objects with a `text`.

    Raises PydanticCustomError at the first entry that is neither.
    """
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("documents", "must be a non-empty list of texts, or of objects with a `text`")
    return [_parse_document(number, document) for number, document in enumerate(value)]


def _parse_document(number: int, document: object) -> str:
    text = document.get("text") if isinstance(document, dict) else document
    if not isinstance(text, str):
        raise PydanticCustomError("documents", f"must be texts, or objects with a `text`; number {number} is neither")
    return text


def _parse_texts(value: object) -> object:
    """Return a text, or a list of texts, as a list; None stays None."""
    if isinstance(value, str):
        return [value]
    if value is None or (isinstance(value, list) and value and all(isinstance(text, str) for text in value)):
        return value
    raise PydanticCustomError("texts", "must be a text or a non-empty list of texts")


def _refuse_negative(value: object) -> object:
    if isinstance(value, int) and value < 0:
        raise PydanticCustomError("non_negative", "must be a non-negative integer")
    return value


def _list_of(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


Documents = Annotated[list[str], PlainValidator(_parse_documents), WithJsonSchema(_list_of(_DOCUMENT))]
Texts = Annotated[
    list[str] | None,
    BeforeValidator(_parse_texts),
    WithJsonSchema({"anyOf": [_TEXT, _list_of(_TEXT), {"type": "null"}]}),
]


class PairFields(PromptFields):
    """The fields that all bodies with vLLM's names have."""

    truncates = "right"

    use_activation: bool | None = True
    """Whether to apply the model's activation; if false, the response has logits. No effect on models that embed."""
    instruction: Annotated[str, Field(min_length=1, max_length=INSTRUCTION_CHARACTERS_MAX)] | None = None
    """What a document has to be, in place of the model's own instruction. Only for models that rank with a chat
    template."""


class RerankRequest(PairFields):
    """POST /v1/rerank and /v2/rerank."""

    place = Place.RERANK

    query: Query
    """The query."""
    documents: Documents
    """Texts, or objects with a `text`. A text may be empty."""
    top_n: Annotated[int, Field(ge=0, lt=2**31), INTEGRAL] | None = None
    """Return only this many results, the best ones; 0: all."""
    return_documents: bool | None = None
    """Whether each result has the document's text; default: true on /rerank, false on /v1/rerank and /v2/rerank."""
    max_tokens_per_doc: Annotated[int, Field(ge=0, lt=2**31), INTEGRAL, BeforeValidator(_refuse_negative)] | None = None
    """Use at most this many tokens from the beginning of each document; 0: all tokens."""


class ScoreRequest(PairFields):
    """POST /v1/score."""

    place = Place.SCORE
    pairs_of: ClassVar[tuple[tuple[str, str], ...]] = (
        ("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"),
    )  # fmt: skip

    text_1: Texts = None
    """A text, or several."""
    text_2: Texts = None
    """A text, or several: as many as in `text_1`, compared in pairs; or any number, if `text_1` is one text."""
    queries: Texts = None
    """Another name of `text_1`."""
    documents: Texts = None
    """Another name of `text_2`, for use with `queries`."""
    items: Texts = None
    """Another name of `documents`."""
    data_1: Texts = None
    """Another name of `text_1`."""
    data_2: Texts = None
    """Another name of `text_2`."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        self._find_names()
        return self

    def _find_names(self) -> tuple[str, str]:
        """Return the names of the two fields that have the texts.

        Raises PydanticCustomError unless the body has exactly two fields that belong together.
        """
        given = {name for names in self.pairs_of for name in names if getattr(self, name) is not None}
        for names in self.pairs_of:
            if given == set(names):
                return names
        pairs = ", or ".join(" and ".join(names) for names in self.pairs_of)
        raise PydanticCustomError("text_1", f"send exactly one pair of fields: {pairs}")

    def read_texts(self) -> tuple[list[str], list[str], tuple[str, str]]:
        """Return both lists of texts and the names of their fields. Raises InvalidRequest if their lengths differ.

        A single first text may be compared with any number of second texts.
        """
        names = self._find_names()
        first: list[str] = getattr(self, names[0])
        second: list[str] = getattr(self, names[1])
        if len(first) not in (1, len(second)):
            message = f"{names[0]} has {len(first)} texts and {names[1]} {len(second)}; send equally many, or one query"
            raise InvalidRequest(message, param=names[1])
        return first, second, names


class TeiRerankRequest(TeiScoreFields):
    """POST /rerank."""

    query: Query
    """The query."""
    texts: Annotated[list[str], Field(min_length=1, fail_fast=True)]
    """The texts to rank. A text may be empty."""
    return_text: bool | None = False
    """True: each result has the text."""
