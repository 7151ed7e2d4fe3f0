"""Reads answers of engines, which run tenants' images: what has another form than expected is shown as text. Pure."""

import base64
import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from conveyor_api.text import clip
from conveyor_console.playground.api_requests import ApiRequest, Reading

MAX_ROWS: Final = 100
_MAX_SHOWN: Final = 20_000  # characters of an answer that is shown as it came
_MAX_LABELS: Final = 5
_FIRST_NUMBERS: Final = 4
_KINDS: Final = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"RIFF": "webp"}
_INVALID: Final = (msgspec.DecodeError, RecursionError, ValueError)

_Scalar = str | int | float | bool | None


class _Error(msgspec.Struct):
    code: str | int | None = None
    message: str = ""


class _Failure(msgspec.Struct):
    error: str | _Error


class _Usage(msgspec.Struct):
    receipt: msgspec.Raw = msgspec.Raw()


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    """An event of a chat, of a completion or of a transcript."""

    choices: list[_Choice] | None = None
    type: str = ""
    delta: str = ""
    usage: _Usage | None = None
    error: str | _Error | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a stream."""

    text: str = ""
    thinking: str = ""
    reason: str = ""
    """Why the text ended; "" if it has not."""
    receipt: bytes = b""
    """JSON; b"" if the piece has none."""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Answer:
    """What is shown of a whole answer. `pictures`: data URIs. `receipt`: JSON; b"" if the answer has none."""

    text: str = ""
    table: Table | None = None
    pictures: Sequence[str] = ()
    receipt: bytes = b""


class _Embedding(msgspec.Struct):
    index: int
    embedding: list[float]


class _Embeddings(msgspec.Struct):
    data: list[_Embedding]
    usage: _Usage | None = None


class _Result(msgspec.Struct):
    index: int
    relevance_score: float


class _Ranking(msgspec.Struct):
    results: list[_Result]
    usage: _Usage | None = None


class _Score(msgspec.Struct):
    label: str
    score: float


class _Entity(msgspec.Struct):
    entity: str
    word: str
    score: float


class _Labelled(msgspec.Struct):
    index: int
    label: str = ""
    probs: list[float] = msgspec.field(default_factory=list)
    scores: list[_Score] = msgspec.field(default_factory=list)
    entities: list[_Entity] = msgspec.field(default_factory=list)


class _Labels(msgspec.Struct):
    data: list[_Labelled]
    usage: _Usage | None = None


class _Picture(msgspec.Struct):
    b64_json: str


class _Pictures(msgspec.Struct):
    data: list[_Picture]
    usage: _Usage | None = None


class _Tensors(msgspec.Struct):
    outputs: msgspec.Raw


def read_event(data: bytes) -> Piece:
    """Return what an event adds. data: JSON, without `data:`."""
    try:
        event = msgspec.json.decode(data, type=_Event)
    except _INVALID:
        return Piece(problem="The engine sent an event that the console does not understand.")
    if event.error is not None:
        return Piece(problem=_describe(event.error))
    if event.type:  # of a transcript
        reason = "stop" if event.type.endswith(".done") else ""
        return Piece(event.delta, reason=reason, receipt=_take_receipt(event.usage))
    choice = event.choices[0] if event.choices else _Choice()
    delta = choice.delta or _Delta()
    text = delta.content or choice.text or ""
    return Piece(text, delta.reasoning or "", choice.finish_reason or "", _take_receipt(event.usage))


def read_answer(request: ApiRequest, body: bytes) -> Answer:
    """Return what is shown of a whole answer with status 200."""
    try:
        return _READERS[request.reading](request, body)
    except (*_INVALID, LookupError, TypeError, OverflowError):
        return Answer(_show_start(body))


def describe_error(status: int, body: bytes, retry_after: str) -> str:
    """Return a sentence about an answer that is an error, in the format of OpenAI's API or another one."""
    try:
        told = _describe(msgspec.json.decode(body, type=_Failure).error)
    except _INVALID:
        told = _show_start(body) or "The answer is empty."
    after = f" Try again in {retry_after} s." if retry_after.isascii() and retry_after.isdigit() else ""
    return f"Status {status}: {told}{after}"


def show_receipt(receipt: bytes, header: str) -> str:
    """Return the receipt as JSON for people; "" if there is none, or one that is no flat object.

    receipt: of the answer's usage, or b"". header: X-Receipt of the answer, or "".
    """
    found = receipt or header.encode(errors="replace")
    try:
        return json.dumps(msgspec.json.decode(found, type=dict[str, _Scalar]), indent=2) if found else ""
    except _INVALID:
        return ""


def _take_receipt(usage: _Usage | None) -> bytes:
    """Return a copy of the receipt; b"" if there is none, or one that is too long to be shown."""
    found = b"" if usage is None else bytes(usage.receipt)
    return found if len(found) <= _MAX_SHOWN else b""


def _show_start(body: bytes) -> str:
    return body[:_MAX_SHOWN].decode(errors="replace")


def _describe(error: str | _Error) -> str:
    """Return the code and the message of an error."""
    if isinstance(error, str):
        return clip(error)
    return clip(f"{error.code}: {error.message}" if error.code else error.message)


def _read_embeddings(request: ApiRequest, body: bytes) -> Answer:
    answer = msgspec.json.decode(body, type=_Embeddings)
    vectors = [each.embedding for each in answer.data[:MAX_ROWS]]
    rows = [
        (request.inputs[each.index], _show(_compare(vectors[0], vector)), str(len(vector)), _show_first(vector))
        for each, vector in zip(answer.data, vectors, strict=False)
    ]
    table = Table(("Text", "Cosine with the first", "Numbers", "The first numbers"), rows)
    return Answer(table=table, receipt=_take_receipt(answer.usage))


def _compare(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the cosine of two vectors; 0 if one is 0."""
    length = math.hypot(*first) * math.hypot(*second)
    return sum(map(operator.mul, first, second)) / length if length else 0.0


def _show_first(vector: Sequence[float]) -> str:
    more = ", …" if len(vector) > _FIRST_NUMBERS else ""
    return ", ".join(map(_show, vector[:_FIRST_NUMBERS])) + more


def _show(number: float) -> str:
    return f"{number:.4g}"


def _read_ranking(request: ApiRequest, body: bytes) -> Answer:
    answer = msgspec.json.decode(body, type=_Ranking)
    rows = [(_show(each.relevance_score), request.inputs[each.index]) for each in answer.results[:MAX_ROWS]]
    return Answer(table=Table(("Score", "Document"), rows), receipt=_take_receipt(answer.usage))


def _read_labels(request: ApiRequest, body: bytes) -> Answer:
    answer = msgspec.json.decode(body, type=_Labels)
    rows = [
        (request.inputs[each.index], each.label or _show_entities(each.entities), _show(max(each.probs, default=0.0)))
        for each in answer.data[:MAX_ROWS]
    ]
    return Answer(table=Table(("Text", "Label", "Score"), rows), receipt=_take_receipt(answer.usage))


def _show_entities(entities: Sequence[_Entity]) -> str:
    return ", ".join(f"{each.word} ({each.entity})" for each in entities[:MAX_ROWS]) or "–"


def _read_image_labels(_request: ApiRequest, body: bytes) -> Answer:
    answer = msgspec.json.decode(body, type=_Labels)
    rows = [(each.label, _show(each.score)) for each in answer.data[0].scores[:_MAX_LABELS]]
    return Answer(table=Table(("Label", "Score"), rows), receipt=_take_receipt(answer.usage))


def _read_pictures(_request: ApiRequest, body: bytes) -> Answer:
    answer = msgspec.json.decode(body, type=_Pictures)
    return Answer(
        pictures=[_build_uri(each.b64_json) for each in answer.data[:MAX_ROWS]], receipt=_take_receipt(answer.usage)
    )


def _build_uri(encoded: str) -> str:
    """Return the data URI of a picture. Raises LookupError or binascii.Error if it is none that the page shows."""
    start = base64.b64decode(encoded, validate=True)[:4]
    kinds = [kind for magic, kind in _KINDS.items() if start.startswith(magic)]
    return f"data:image/{kinds[0]};base64,{encoded}"


def _read_tensors(_request: ApiRequest, body: bytes) -> Answer:
    outputs = bytes(msgspec.json.decode(body, type=_Tensors).outputs)
    if len(outputs) > _MAX_SHOWN:
        return Answer(_show_start(outputs))
    return Answer("\n".join(json.dumps(each, ensure_ascii=False) for each in msgspec.json.decode(outputs, type=list)))


_READERS: Final[Mapping[Reading, Callable[[ApiRequest, bytes], Answer]]] = {
    "embeddings": _read_embeddings,
    "ranking": _read_ranking,
    "labels": _read_labels,
    "image labels": _read_image_labels,
    "pictures": _read_pictures,
    "tensors": _read_tensors,
}
