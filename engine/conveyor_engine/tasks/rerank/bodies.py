"""The bodies that ask for scores of pairs, with the names of Cohere, Jina, vLLM and text-embeddings-inference. Pure."""

from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.serving.preparing.fields import Place
from conveyor_engine.serving.preparing.schemas import PromptFields
from conveyor_engine.serving.preparing.tei import TeiScoreFields
from conveyor_engine.serving.preparing.values import INTEGRAL

Query = Annotated[str, Field(min_length=1)]

_TEXT = {"type": "string"}
_DOCUMENT = {"anyOf": [_TEXT, {"type": "object", "properties": {"text": _TEXT}, "required": ["text"]}]}


def _parse_documents(value: object) -> list[str]:
    """A list of texts, or of objects with a text -> texts. Stops at the first that is neither."""
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("documents", "must be a list of texts, or of objects with a `text`, not empty")
    return [_parse_document(number, document) for number, document in enumerate(value)]


def _parse_document(number: int, document: object) -> str:
    text = document.get("text") if isinstance(document, dict) else document
    if not isinstance(text, str):
        raise PydanticCustomError("documents", f"must be texts, or objects with a `text`; number {number} is neither")
    return text


def _parse_texts(value: object) -> object:
    """A text, or a list of texts -> a list."""
    if isinstance(value, str):
        return [value]
    if value is None or (isinstance(value, list) and value and all(isinstance(text, str) for text in value)):
        return value
    raise PydanticCustomError("texts", "must be a text or a list of texts, not empty")


def _list_of(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


Documents = Annotated[list[str], PlainValidator(_parse_documents), WithJsonSchema(_list_of(_DOCUMENT))]
Texts = Annotated[
    list[str] | None,
    BeforeValidator(_parse_texts),
    WithJsonSchema({"anyOf": [_TEXT, _list_of(_TEXT), {"type": "null"}]}),
]


class PairFields(PromptFields):
    """What bodies with vLLM's names have in common."""

    truncates = "right"

    use_activation: bool | None = True
    """Whether to apply the model's activation; if false, the response has logits."""


class RerankRequest(PairFields):
    """POST /v1/rerank and /v2/rerank."""

    place = Place.RERANK

    query: Query
    """The query."""
    documents: Documents
    """Texts, or objects with a `text`. A text may be empty."""
    top_n: Annotated[int, Field(ge=0, lt=2**31), INTEGRAL] | None = None
    """Return only this many results, the best ones; 0: all."""
    return_documents: bool | None = False
    """True: each result has the document's text."""
    max_tokens_per_doc: Annotated[int, Field(ge=1, lt=2**31), INTEGRAL] | None = None
    """Use only the first tokens of each document, this many."""


class ScoreRequest(PairFields):
    """POST /v1/score."""

    place = Place.SCORE
    pairs_of: ClassVar[tuple[tuple[str, str], ...]] = (("text_1", "text_2"), ("queries", "documents"))

    text_1: Texts = None
    """A text, or several."""
    text_2: Texts = None
    """The texts to compare with: the same number as `text_1`, in pairs, or any number if `text_1` is one text."""
    queries: Texts = None
    """Another name of `text_1`."""
    documents: Texts = None
    """Another name of `text_2`."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        given = {name for names in self.pairs_of for name in names if getattr(self, name) is not None}
        if given not in map(set, self.pairs_of):
            raise PydanticCustomError("text_1", "text_1 and text_2 are needed, or queries and documents, and no others")
        return self

    def read_pairs(self) -> tuple[list[tuple[str, str]], str, str]:
        """The pairs of texts, and the names of the two fields. Raises InvalidRequest unless the texts match."""
        first_name, second_name = next(names for names in self.pairs_of if getattr(self, names[0]) is not None)
        first: list[str] = getattr(self, first_name)
        second: list[str] = getattr(self, second_name)
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            message = f"{first_name} has {len(first)} texts and {second_name} {len(second)}; send as many, or one query"
            raise InvalidRequest(message, param=second_name)
        return list(zip(first, second, strict=True)), first_name, second_name


class TeiRerankRequest(TeiScoreFields):
    """POST /rerank."""

    query: Query
    """The query."""
    texts: Annotated[list[str], Field(min_length=1, fail_fast=True)]
    """The texts to rank. A text may be empty."""
    return_text: bool | None = False
    """True: each result has the text."""
