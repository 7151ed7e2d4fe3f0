"""Makes engine requests of bodies that ask for vectors, one for each input. Runs in worker processes."""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.serving.preparing.jobs import Kind, ServedModel, check_num_inputs, name_input, parse_body
from conveyor_engine.serving.preparing.pictures import IMAGES_MAX, build_kind, process_picture, read_files
from conveyor_engine.serving.preparing.prompts import PreparedPrompts, Prompt, check_answer_size, read_input
from conveyor_engine.serving.preparing.schemas import EmbeddingRequest
from conveyor_engine.tasks.embed.bodies import EmbedRequest
from conveyor_engine.wire.embedding import EmbeddingFacts, PictureFacts, PoolingParams
from conveyor_engine.wire.worker import Job


class PreparedEmbeddings(PreparedPrompts, frozen=True, kw_only=True, array_like=True):
    """An admissible request, in the inputs' order."""

    as_base64: bool = False


def prepare_embeddings(model: ServedModel, job: Job) -> PreparedEmbeddings:
    """Raises InvalidRequest or UnknownModel."""
    fields = parse_body(model, EmbeddingRequest, job.body)
    asked = PoolingParams(dimensions=fields.dimensions)
    read = _read_pictures if fields.modality == "image" else _read_inputs
    prompts = read(model, job, fields, fields.input, "input", asked)
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
    _check_answer(number, asked, embedding, param)
    truncation = fields.truncation(job.facts.max_model_len)
    begin = _find_instruction(fields.prompt_name, embedding)
    payload = asked.encode()
    prompts = []
    for index in range(number):
        text = inputs[index]  # ids, which need no list of their own until here
        whole = begin + text if isinstance(text, str) else text
        tokens = read_input(model, whole, truncation, job.facts, name_input(param, index, number))
        prompts.append(Prompt(tokens, payload, max(0, embedding.padded_tokens - len(tokens))))
    return prompts


def _read_pictures(
    model: ServedModel,
    job: Job,
    _: EmbeddingRequest,
    inputs: Sequence[str | list[int]],
    param: str,
    asked: PoolingParams,
) -> list[Prompt]:
    number, embedding = len(inputs), EmbeddingFacts.read(job.facts)
    if embedding.pictures is None:
        raise InvalidRequest("modality is 'image', and this model embeds texts only", param="modality")
    texts = [text for text in inputs if isinstance(text, str)]
    if len(texts) < number:
        raise InvalidRequest(f"{param} has token ids: with modality 'image' send data: URIs with base64", param=param)
    if number > IMAGES_MAX:
        raise InvalidRequest(f"{param} has {number} images, and may have {IMAGES_MAX}", param=param)
    _check_answer(number, asked, embedding, param)
    return [
        _read_picture(model, embedding.pictures, data, name_input(param, index, number), asked)
        for index, data in enumerate(read_files(texts, param))
    ]


def _read_picture(model: ServedModel, facts: PictureFacts, data: bytes, param: str, asked: PoolingParams) -> Prompt:
    pixels = process_picture(model, data, param)
    if pixels.shape != facts.shape:
        made = " x ".join(map(str, pixels.shape))
        raise InvalidRequest(f"{param} becomes {made}, and the model takes squares: make its sides alike", param=param)
    payload = msgspec.structs.replace(asked, pixels=pixels.tobytes()).encode()
    return Prompt([], payload, facts.num_tokens, facts.num_tokens)


def _check_answer(number: int, asked: PoolingParams, embedding: EmbeddingFacts, param: str) -> None:
    _check_dimensions(asked.dimensions, embedding)
    check_answer_size(number, asked.dimensions or embedding.size, "dimensions", param)


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
    "embedding_of_images": build_kind(prepare_embeddings, PreparedEmbeddings),
    "embed": Kind(prepare_embed, PreparedEmbeddings),
}
