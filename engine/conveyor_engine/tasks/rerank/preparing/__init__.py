"""Builds the engine requests for a body that requests scores, one for each pair of texts. Runs in worker processes."""

from collections.abc import Mapping
from typing import Final

from conveyor_engine.serving.preparing.comparing import Comparison, PreparedComparison, build_kinds
from conveyor_engine.serving.preparing.comparing_schemas import TeiRerankRequest
from conveyor_engine.serving.preparing.jobs import BodyKind, ServedModel
from conveyor_engine.serving.preparing.pairs import encode_pairs
from conveyor_engine.serving.preparing.tokens import TOKEN_KINDS
from conveyor_engine.tasks.rerank.preparing.rendered import PairRenderer
from conveyor_engine.wire.classification import Activation, ClassifierFacts
from conveyor_engine.wire.worker import Job


class PreparedPairs(PreparedComparison, frozen=True, kw_only=True, array_like=True):
    """A valid request, with a prompt for each pair, in order."""

    activation: Activation  # the function that turns logits into scores


def prepare_pairs(model: ServedModel, job: Job, comparison: Comparison) -> PreparedPairs:
    """Prepare a comparison, one engine request for each pair. Raises InvalidRequest or UnknownModel."""
    second, truncation = comparison.second, comparison.truncation(job)
    first = comparison.first if len(comparison.first) > 1 else [comparison.first[0]] * len(second)
    pairs = list(zip(first, second, strict=True))
    template = ClassifierFacts.read(job.facts).template
    if template is not None:
        prompts = list(PairRenderer(model, job.facts, template, comparison, truncation).render(pairs))
    else:
        comparison.refuse_instruction()
        params, most = comparison.params, comparison.max_second_tokens
        prompts = encode_pairs(model, job.facts, pairs, params, truncation, most)
    return PreparedPairs.of_comparison(comparison, prompts, job, activation=_choose_activation(job, comparison))


def _choose_activation(job: Job, comparison: Comparison) -> Activation:
    """Return the model's activation; none if the client wants logits.

    For a body in text-embeddings-inference's format, the sigmoid replaces the model's activation, as in that server.
    """
    fields = comparison.fields
    if isinstance(fields, TeiRerankRequest):
        return "none" if fields.raw_scores else "sigmoid"
    return "none" if fields.use_activation is False else ClassifierFacts.read(job.facts).activation


TASK: Final[Mapping[str, BodyKind]] = {**TOKEN_KINDS, **build_kinds(prepare_pairs, PreparedPairs)}
