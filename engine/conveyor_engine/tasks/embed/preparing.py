"""Makes engine requests of a body of /v1/embeddings, one for each input. Runs in the workers of `preparing.process`."""

from collections.abc import Mapping
from typing import Final

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.serving.preparing.jobs import Kind, ServedModel, parse_body, too_many
from conveyor_engine.serving.preparing.prompts import PreparedPrompts, Prompt, check_answer_size, read_input
from conveyor_engine.serving.preparing.schemas import EmbeddingRequest
from conveyor_engine.wire.embedding import EmbeddingFacts, PoolingParams
from conveyor_engine.wire.worker import Job

_PARAM = "input"


class PreparedEmbeddings(PreparedPrompts, frozen=True, kw_only=True, array_like=True):
    """An admissible request, in the inputs' order."""

    as_base64: bool


def prepare_embeddings(model: ServedModel, job: Job) -> PreparedEmbeddings:
    """Raises InvalidRequest or UnknownModel."""
    fields = parse_body(model, EmbeddingRequest, job.body)
    if len(fields.input) > job.num_requests_max:
        raise too_many("the number of inputs", len(fields.input), job, _PARAM)
    embedding = EmbeddingFacts.read(job.facts)
    _check_dimensions(fields.dimensions, embedding)
    check_answer_size(len(fields.input), fields.dimensions or embedding.size, "dimensions", _PARAM)
    truncation = fields.truncation(job.facts.max_model_len)
    prompts = [read_input(model, text, truncation, job.facts, _PARAM) for text in fields.input]
    payload = PoolingParams(dimensions=fields.dimensions).encode()
    return PreparedEmbeddings.of(
        "embd",
        [Prompt(prompt, payload) for prompt in prompts],
        job,
        fields,
        as_base64=fields.encoding_format == "base64",
    )


def _check_dimensions(dimensions: int | None, embedding: EmbeddingFacts) -> None:
    if dimensions is None or embedding.allows(dimensions):
        return
    if not embedding.is_matryoshka:
        allowed = f"its config.json does not say that it was trained for fewer (is_matryoshka) than {embedding.size}"
    elif embedding.matryoshka_dimensions:
        allowed = f"it was trained for {', '.join(map(str, embedding.matryoshka_dimensions))} and {embedding.size}"
    else:
        allowed = f"it has {embedding.size}"
    raise InvalidRequest(f"dimensions is {dimensions}, which this model does not have: {allowed}", param="dimensions")


TASK: Final[Mapping[str, Kind]] = {"embedding": Kind(prepare_embeddings, PreparedEmbeddings)}
