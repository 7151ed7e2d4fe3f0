"""Makes engine requests of bodies that ask for scores, one for each pair. Runs in worker processes."""

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from conveyor_engine.serving.preparing.jobs import Kind, ServedModel, check_num_inputs, parse_body
from conveyor_engine.serving.preparing.pairs import encode_pairs
from conveyor_engine.serving.preparing.prompts import PreparedPrompts
from conveyor_engine.tasks.rerank.bodies import RerankRequest, ScoreRequest, TeiRerankRequest
from conveyor_engine.wire.classification import Activation, ClassifierFacts
from conveyor_engine.wire.worker import Job


class PreparedPairs(PreparedPrompts, frozen=True, kw_only=True, array_like=True):
    """An admissible request, in the pairs' order."""

    activation: Activation  # what makes scores of the logits
    top_n: int | None = None  # only so many results
    texts: list[str] | None = None  # that the results are to have
    as_ranks: bool = False  # in text-embeddings-inference's shape


class _Documents(msgspec.Struct):
    """What tells vLLM's body from that of text-embeddings-inference."""

    documents: msgspec.Raw | UnsetType = UNSET


def prepare_rerank(model: ServedModel, job: Job) -> PreparedPairs:
    """Raises InvalidRequest or UnknownModel."""
    fields = parse_body(model, RerankRequest, job.body)
    check_num_inputs(len(fields.documents), "documents")
    prompts = encode_pairs(
        model,
        job.facts,
        [(fields.query, document) for document in fields.documents],
        ("query", "documents[{}]"),
        fields.truncation(job.facts.max_model_len),
        fields.max_tokens_per_doc,
    )
    return PreparedPairs.of(
        "rerank",
        prompts,
        job,
        fields,
        "documents",
        activation=_choose_activation(job, fields.use_activation),
        top_n=fields.top_n or None,
        texts=fields.documents if fields.return_documents else None,
    )


def prepare_score(model: ServedModel, job: Job) -> PreparedPairs:
    """Raises InvalidRequest or UnknownModel."""
    fields = parse_body(model, ScoreRequest, job.body)
    pairs, *params = fields.read_pairs()
    check_num_inputs(len(pairs), params[1])
    truncation = fields.truncation(job.facts.max_model_len)
    prompts = encode_pairs(model, job.facts, pairs, (params[0], f"{params[1]}[{{}}]"), truncation)
    activation = _choose_activation(job, fields.use_activation)
    return PreparedPairs.of("score", prompts, job, fields, params[1], activation=activation)


def prepare_either_rerank(model: ServedModel, job: Job) -> PreparedPairs:
    """By whether the body has `documents`. Raises InvalidRequest or UnknownModel."""
    try:
        has_documents = msgspec.json.decode(job.body, type=_Documents).documents is not UNSET
    except msgspec.DecodeError:
        has_documents = False  # what is wrong with it is told below
    return prepare_rerank(model, job) if has_documents else _prepare_tei_rerank(model, job)


def _prepare_tei_rerank(model: ServedModel, job: Job) -> PreparedPairs:
    fields = parse_body(model, TeiRerankRequest, job.body)
    check_num_inputs(len(fields.texts), "texts")
    pairs = [(fields.query, text) for text in fields.texts]
    prompts = encode_pairs(model, job.facts, pairs, ("query", "texts[{}]"), fields.truncation(job.facts.max_model_len))
    return PreparedPairs.of(
        "rerank",
        prompts,
        job,
        fields,
        "texts",
        activation="none" if fields.raw_scores else "sigmoid",
        texts=fields.texts if fields.return_text else None,
        as_ranks=True,
    )


def _choose_activation(job: Job, wanted: bool | None) -> Activation:
    """The model's own, unless the client wants its logits."""
    return "none" if wanted is False else ClassifierFacts.read(job.facts).activation


TASK: Final[Mapping[str, Kind]] = {
    "rerank": Kind(prepare_rerank, PreparedPairs),
    "score": Kind(prepare_score, PreparedPairs),
    "either_rerank": Kind(prepare_either_rerank, PreparedPairs),
}
