"""What bodies that ask for scores of pairs compare, and what their answers need, whatever their names. For tasks."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, Self

import msgspec
from msgspec import UNSET, UnsetType

from conveyor_engine.serving.preparing.comparing_schemas import RerankRequest, ScoreRequest, TeiRerankRequest
from conveyor_engine.serving.preparing.jobs import Kind, ServedModel, check_num_inputs, parse_body
from conveyor_engine.serving.preparing.prompts import PreparedPrompts, Prompt
from conveyor_engine.text.tokenizer import Truncation
from conveyor_engine.wire.worker import Job

Shape = Literal["rerank", "score", "ranks"]


class Comparison(NamedTuple):
    """The pairs of a body."""

    fields: RerankRequest | ScoreRequest | TeiRerankRequest
    shape: Shape  # of the answer: vLLM's of documents or of pairs, or text-embeddings-inference's
    first: Sequence[str]  # as many as the second ones, or one that is compared with each of them
    second: Sequence[str]
    params: tuple[str, str]  # their fields; `{}` in it is the number of the text
    max_second_tokens: int | None = None
    top_n: int | None = None
    returns_texts: bool = False

    def truncation(self, job: Job) -> Truncation | None:
        """How a pair is cut. Raises InvalidRequest."""
        return self.fields.truncation(job.facts.max_model_len)


class PreparedComparison(PreparedPrompts, frozen=True, kw_only=True, array_like=True):
    """An admissible request, in the order of its texts. A task's own struct has what makes scores of its results."""

    shape: Shape
    top_n: int | None = None  # only so many results
    texts: list[str] | None = None  # that the results are to have

    @classmethod
    def of_comparison(cls, comparison: Comparison, prompts: Sequence[Prompt], job: Job, **own: Any) -> Self:
        """`own`: what a subclass adds."""
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
    """What tells vLLM's body from that of text-embeddings-inference."""

    documents: msgspec.Raw | UnsetType = UNSET


def _read_rerank(model: ServedModel, job: Job, *, shows_texts: bool = False) -> Comparison:
    """`shows_texts`: whether results have their texts if the body does not say."""
    fields = parse_body(model, RerankRequest, job.body)
    check_num_inputs(len(fields.documents), "documents")
    return Comparison(
        fields, "rerank", [fields.query], fields.documents, ("query", "documents[{}]"),
        fields.max_tokens_per_doc or None, fields.top_n or None,
        shows_texts if fields.return_documents is None else fields.return_documents,
    )  # fmt: skip


def _read_score(model: ServedModel, job: Job) -> Comparison:
    fields = parse_body(model, ScoreRequest, job.body)
    first, second, params = fields.read_texts()
    check_num_inputs(len(second), params[1])
    return Comparison(fields, "score", first, second, (params[0], f"{params[1]}[{{}}]"))


def _read_either_rerank(model: ServedModel, job: Job) -> Comparison:
    """By whether the body has `documents`. On this path they come back by default, as in vLLM."""
    try:
        has_documents = msgspec.json.decode(job.body, type=_Documents).documents is not UNSET
    except msgspec.DecodeError:
        has_documents = False  # what is wrong with it is told below
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
) -> dict[str, Kind]:
    """The kinds of bodies, for a task that makes engine requests of a comparison by `prepare`."""

    def build(read: Callable[[ServedModel, Job], Comparison]) -> Kind:
        return Kind(lambda model, job: prepare(model, job, read(model, job)), prepared)

    return {name: build(read) for name, read in _READERS.items()}
