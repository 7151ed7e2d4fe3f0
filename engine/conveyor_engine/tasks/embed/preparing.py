"""Makes engine requests of bodies that ask for vectors, one for each input. Runs in worker processes."""

from collections.abc import Mapping, Sequence
from typing import Final

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.serving.preparing.jobs import Kind, ServedModel, check_num_inputs, name_input, parse_body
from conveyor_engine.serving.preparing.prompts import PreparedPrompts, Prompt, check_answer_size, read_input
from conveyor_engine.serving.preparing.schemas import EmbeddingRequest
from conveyor_engine.tasks.embed.bodies import EmbedRequest
from conveyor_engine.wire.embedding import EmbeddingFacts, PoolingParams
from conveyor_engine.wire.worker import Job


class PreparedEmbeddings(PreparedPrompts, frozen=True, kw_only=True, array_like=True):
    """An admissible request, in the inputs' order."""

    as_base64: bool = False


def prepare_embeddings(model: ServedModel, job: Job) -> PreparedEmbeddings:
    """Raises InvalidRequest or UnknownModel."""
    fields = parse_body(model, EmbeddingRequest, job.body)
    prompts = _read_inputs(model, job, fields, fields.input, "input", PoolingParams(dimensions=fields.dimensions))
    return PreparedEmbeddings.of("embd", prompts, job, fields, "input", as_base64=fields.encoding_format == "base64")


def prepare_embed(model: ServedModel, job: Job) -> PreparedEmbeddings:
    """Raises InvalidRequest or UnknownModel."""
    fields = parse_body(model, EmbedRequest, job.body)
    asked = PoolingParams(dimensions=fields.dimensions, normalizes=fields.normalize is not False)
    prompts = _read_inputs(model, job, fields, fields.inputs, "inputs", asked)
    return PreparedEmbeddings.of("embed", prompts, job, fields, "inputs")


def _read_inputs(
    model: ServedModel,
    job: Job,
    fields: EmbeddingRequest | EmbedRequest,
    inputs: Sequence[str | list[int]],
    param: str,
    asked: PoolingParams,
) -> list[Prompt]:
    number = len(inputs)
    check_num_inputs(number, param)
    embedding = EmbeddingFacts.read(job.facts)
    _check_dimensions(asked.dimensions, embedding)
    check_answer_size(number, asked.dimensions or embedding.size, "dimensions", param)
    truncation = fields.truncation(job.facts.max_model_len)
    begin = _find_instruction(fields.prompt_name, embedding)
    payload = asked.encode()
    prompts = []
    for index in range(number):
        text = inputs[index]  # ids, which need no list of their own until here
        whole = begin + text if isinstance(text, str) else text
        tokens = read_input(model, whole, truncation, job.facts, name_input(param, index, number))
        prompts.append(Prompt(tokens, payload))
    return prompts


def _find_instruction(name: str | None, embedding: EmbeddingFacts) -> str:
    """The text that begins each text, as sentence-transformers has it. Token ids are left as they are."""
    if name is None:
        return embedding.instructions.get(embedding.default_instruction, "")
    if name not in embedding.instructions:
        known = ", ".join(sorted(embedding.instructions)) or "none"
        raise InvalidRequest(f"prompt_name is {name[:100]!r}; this model has {known}", param="prompt_name")
    return embedding.instructions[name]


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


TASK: Final[Mapping[str, Kind]] = {
    "embedding": Kind(prepare_embeddings, PreparedEmbeddings),
    "embed": Kind(prepare_embed, PreparedEmbeddings),
}
