"""Reads bodies that request scores for pairs of texts, in the formats of several APIs. Used by tasks rerank and embed.

Each body becomes a `Comparison`, which has the pairs to compare and what the response needs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, Self

import msgspec
from msgspec import UNSET, UnsetType

from conveyor_engine.errors import ErrorCode, InvalidRequest
from conveyor_engine.serving.preparing.comparing_schemas import RerankRequest, ScoreRequest, TeiRerankRequest
from conveyor_engine.serving.preparing.jobs import BodyKind, ServedModel, check_num_inputs, parse_body
from conveyor_engine.serving.preparing.prompts import PreparedPrompts, Prompt
from conveyor_engine.text.tokenizer import Truncation
from conveyor_engine.wire.worker import Job

Shape = Literal["rerank", "score", "ranks"]


class Comparison(NamedTuple):
    """The pairs that a body asks to compare."""

    fields: RerankRequest | ScoreRequest | TeiRerankRequest
    shape: Shape  # the response's format: vLLM's for documents or pairs, or text-embeddings-inference's
    first: Sequence[str]  # as many texts as `second`, or one text that is compared with each text of `second`
    second: Sequence[str]
    params: tuple[str, str]  # the fields of `first` and `second`; `{}` is replaced by the index of the text
    max_second_tokens: int | None = None
    top_n: int | None = None
    returns_texts: bool = False
    instruction: str | None = None  # what a document has to be; only for models whose chat template renders it

    def refuse_instruction(self) -> None:
        """Raise InvalidRequest if the request has an instruction, which the model would not read."""
        if self.instruction is not None:
            raise InvalidRequest(
                "instruction is not supported by this model; leave it out",
                param="instruction", code=ErrorCode.UNSUPPORTED_VALUE,
            )  # fmt: skip

    @property
    def side_field(self) -> str:
        """The body's field that says where texts are cut."""
        return "truncation_direction" if isinstance(self.fields, TeiRerankRequest) else "truncation_side"

    def truncation(self, job: Job) -> Truncation | None:
        """Return how a pair is truncated. Raises InvalidRequest."""
        return self.fields.truncation(job.facts.max_model_len)


class PreparedComparison(PreparedPrompts, frozen=True, kw_only=True, array_like=True):
    """A valid request, in the order of its texts. Each subclass adds the fields that turn results into scores."""

    shape: Shape
    top_n: int | None = None  # return only this many results; None: all
    texts: list[str] | None = None  # the texts to return with the results; None: return no texts

    @classmethod
    def of_comparison(cls, comparison: Comparison, prompts: Sequence[Prompt], job: Job, **own: Any) -> Self:
        """Make engine requests for the prompts. `own`: the fields that a subclass adds."""
        return cls.of(
            "score" if comparison.shape == "score" else "rerank",
            prompts,
            job,
            comparison.fields,
            comparison.params[1].partition("[")[0],
            shape=comparison.shape,
            top_n=comparison.top_n,
            texts=list(comparison.second) if comparison.returns_texts else None,
            **own,
        )


class _Documents(msgspec.Struct):
    """The field that only vLLM's rerank body has; text-embeddings-inference's body has `texts`."""

    documents: msgspec.Raw | UnsetType = UNSET


def _read_rerank(model: ServedModel, job: Job, *, shows_texts: bool = False) -> Comparison:
    """Read a rerank body of vLLM. `shows_texts`: the default of the body's field `return_documents`."""
    fields = parse_body(model, RerankRequest, job.body)
    check_num_inputs(len(fields.documents), "documents")
    return Comparison(
        fields, "rerank", [fields.query], fields.documents, ("query", "documents[{}]"),
        fields.max_tokens_per_doc or None, fields.top_n or None,
        shows_texts if fields.return_documents is None else fields.return_documents, fields.instruction,
    )  # fmt: skip


def _read_score(model: ServedModel, job: Job) -> Comparison:
    fields = parse_body(model, ScoreRequest, job.body)
    first, second, params = fields.read_texts()
    check_num_inputs(len(second), params[1])
    return Comparison(
        fields, "score", first, second, (params[0], f"{params[1]}[{{}}]"), instruction=fields.instruction
    )  # fmt: skip


def _read_either_rerank(model: ServedModel, job: Job) -> Comparison:
    """Read a body of /rerank: vLLM's if it has `documents`, otherwise text-embeddings-inference's.

    On this path the response contains the documents by default, as in vLLM.
    """
    try:
        has_documents = msgspec.json.decode(job.body, type=_Documents).documents is not UNSET
    except msgspec.DecodeError:
        has_documents = False  # parse_body below reports the error
    if has_documents:
        return _read_rerank(model, job, shows_texts=True)
    fields = parse_body(model, TeiRerankRequest, job.body)
    check_num_inputs(len(fields.texts), "texts")
    shown = bool(fields.return_text)
    return Comparison(fields, "ranks", [fields.query], fields.texts, ("query", "texts[{}]"), returns_texts=shown)


_READERS: Final[Mapping[str, Callable[[ServedModel, Job], Comparison]]] = {
    "rerank": _read_rerank,
    "score": _read_score,
    "either_rerank": _read_either_rerank,
}


def build_kinds(
    prepare: Callable[[ServedModel, Job, Comparison], PreparedComparison], prepared: type[PreparedComparison]
) -> dict[str, BodyKind]:
    """Return the kinds of bodies for a task whose `prepare` turns a comparison into engine requests."""

    def build(read: Callable[[ServedModel, Job], Comparison]) -> BodyKind:
        return BodyKind(lambda model, job: prepare(model, job, read(model, job)), prepared)

    return {name: build(read) for name, read in _READERS.items()}
