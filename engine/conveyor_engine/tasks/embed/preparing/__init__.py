"""Makes an engine request for each input of a body that requests vectors. Runs in worker processes."""

import sys
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.serving.preparing.comparing import Comparison, PreparedComparison, build_kinds
from conveyor_engine.serving.preparing.inputs import read_inputs
from conveyor_engine.serving.preparing.jobs import BodyKind, ServedModel, check_num_inputs, name_input, parse_body
from conveyor_engine.serving.preparing.pictures import IMAGES_MAX, build_kind, process_picture, read_files
from conveyor_engine.serving.preparing.prompts import PreparedPrompts, Prompt, check_answer_size, read_input
from conveyor_engine.serving.preparing.tokens import TOKEN_KINDS
from conveyor_engine.tasks.embed.bodies import (
    EmbedAllRequest,
    EmbeddingRequest,
    EmbedRequest,
    EmbedSparseRequest,
    PoolingRequest,
    VectorFields,
)
from conveyor_engine.tasks.embed.facts import EmbeddingFacts, EmbedDtype, Output, PictureFacts, PoolingParams
from conveyor_engine.tasks.embed.preparing.tokens import (
    POOLING_TASKS,
    check_output,
    encode_pairs,
    encode_tokens,
    find_encoding,
)
from conveyor_engine.text.tokenizer import Truncation
from conveyor_engine.wire.worker import Job

METADATA_INPUTS_MAX: Final = 48  # each needs 110 to 140 bytes of the header; many clients accept headers up to 8 KiB


class PreparedEmbeddings(PreparedPrompts, frozen=True, kw_only=True, array_like=True):
    """A valid request, with a prompt for each input, in order."""

    encoding: Literal["float", "base64", "bytes", "bytes_only"] = "float"
    dtype: EmbedDtype = "float32"
    endianness: Literal["native", "little", "big"] = "native"
    vector_size: int = 0  # numbers for each token of an input; 0: an input has one vector, or one number for each token
    is_marked: bool = False  # whether results begin with `RESULT_MARK`


def prepare_embeddings(model: ServedModel, job: Job) -> PreparedEmbeddings:
    """Prepare a body of /v1/embeddings. Raises InvalidRequest or UnknownModel."""
    fields = parse_body(model, EmbeddingRequest, job.body)
    params = _read_params(fields, "embed")
    embedding = _check_size(job, fields.num_inputs(), params.dimensions, fields.inputs_field)
    if fields.modality == "image":
        prompts = _read_pictures(model, fields, embedding, params)
    else:
        prompts = _read_texts(model, job, fields, embedding, params)
    return PreparedEmbeddings.of("embd", prompts, job, fields, fields.inputs_field, **_describe(fields))


def prepare_pooling(model: ServedModel, job: Job) -> PreparedEmbeddings:
    """Prepare a body of /pooling. Raises InvalidRequest or UnknownModel."""
    fields = parse_body(model, PoolingRequest, job.body)
    embedding = EmbeddingFacts.read(job.facts)
    has: list[Output] = [each for each in POOLING_TASKS if each in embedding.outputs]
    task: Output = fields.task or (has[0] if has else "embed")
    params = _read_params(fields, task)
    if task == "embed":
        _check_size(job, fields.num_inputs(), params.dimensions, fields.inputs_field)
        prompts = _read_texts(model, job, fields, embedding, params)
        return PreparedEmbeddings.of("pool", prompts, job, fields, fields.inputs_field, **_describe(fields))
    check_output(task, embedding, "task")
    size = embedding.token_size if task == "token_embed" else 1
    if params.dimensions not in (None, size):
        raise InvalidRequest(f"dimensions is {params.dimensions}: vectors of tokens have {size}", param="dimensions")
    params = msgspec.structs.replace(params, dimensions=None)
    prompts = _read_tokens(model, job, fields, embedding, params)
    _check_tokens(prompts, size, fields.inputs_field)
    own = _describe(fields) | {"vector_size": size if task == "token_embed" else 0}
    return PreparedEmbeddings.of("pool", prompts, job, fields, fields.inputs_field, is_marked=True, **own)


def _read_params(fields: VectorFields, output: Output) -> PoolingParams:
    """Read how vectors are made and encoded. Raises InvalidRequest."""
    encoding, endianness = fields.encoding_format or "float", fields.endianness or "native"
    if encoding == "bytes" and fields.num_inputs() > METADATA_INPUTS_MAX:
        most = f"the header `metadata` has room for {METADATA_INPUTS_MAX} inputs, not {fields.num_inputs()}"
        raise InvalidRequest(f"{most}; send fewer, or encoding_format bytes_only", param="encoding_format")
    return PoolingParams(
        output=output,
        dimensions=fields.dimensions or None,  # the client of infinity sends 0 to request all dimensions
        normalizes=fields.use_activation,
        dtype="float32" if encoding == "float" else fields.embed_dtype or "float32",
        is_big_endian=encoding != "float" and (sys.byteorder if endianness == "native" else endianness) == "big",
    )


def _describe(fields: VectorFields) -> dict[str, Any]:
    """Return the fields of `PreparedEmbeddings` about the encoding."""
    encoding = fields.encoding_format or "float"
    dtype = "float32" if encoding == "float" else fields.embed_dtype or "float32"
    return {"encoding": encoding, "dtype": dtype, "endianness": fields.endianness or "native"}


def _read_texts(
    model: ServedModel, job: Job, fields: VectorFields, embedding: EmbeddingFacts, params: PoolingParams
) -> list[Prompt]:
    tokens = read_inputs(model, job, fields, _find_instruction(fields.prompt_name, embedding))
    return [_build_prompt(each, params.encode(), embedding) for each in tokens]


def _read_tokens(
    model: ServedModel, job: Job, fields: VectorFields, embedding: EmbeddingFacts, params: PoolingParams
) -> list[Prompt]:
    """Read the inputs of /pooling whose tokens each get a result. Texts are encoded as `prompt_name` says."""
    encoding = find_encoding(fields.prompt_name, embedding)
    if encoding is None or fields.messages is not None:
        return _read_texts(model, job, fields, embedding, params)
    check_num_inputs(fields.num_inputs(), "input")
    if fields.add_special_tokens is False or fields.padding == "max_length":
        other = "add_special_tokens" if fields.add_special_tokens is False else "padding"
        why = "queries and documents are encoded as the model's files say"
        raise InvalidRequest(f"{other} cannot be set: {why}; leave it out, or prompt_name", param=other)
    truncation = fields.truncation(job.facts.max_model_len)
    begin = _find_instruction(fields.prompt_name, embedding)
    number = len(fields.input)
    return [
        encode_tokens(
            model, job, fields.input[index], name_input("input", index, number), encoding, begin, params, truncation
        )
        for index in range(number)
    ]


class _Modality(msgspec.Struct):
    modality: msgspec.Raw = msgspec.Raw(b"null")


def has_images(body: bytes) -> bool:
    """Return whether the inputs of a body of /v1/embeddings are images."""
    try:
        return bytes(msgspec.json.decode(body, type=_Modality).modality) not in (b"null", b'"text"')
    except (msgspec.DecodeError, RecursionError):
        return True  # it has to be validated to be refused


def prepare_embed(model: ServedModel, job: Job) -> PreparedEmbeddings:
    """Prepare a body of /embed. Raises InvalidRequest or UnknownModel."""
    fields = parse_body(model, EmbedRequest, job.body)
    check_num_inputs(len(fields.inputs), "inputs")
    embedding = _check_size(job, len(fields.inputs), fields.dimensions, "inputs")
    params = PoolingParams(dimensions=fields.dimensions, normalizes=fields.normalize is not False)
    return PreparedEmbeddings.of("embed", _read_tei(model, job, fields, embedding, params), job, fields, "inputs")


def prepare_embed_sparse(model: ServedModel, job: Job) -> PreparedEmbeddings:
    """Prepare a body of /embed_sparse. Raises InvalidRequest or UnknownModel."""
    fields = parse_body(model, EmbedSparseRequest, job.body)
    embedding = check_output("embed_sparse", EmbeddingFacts.read(job.facts))
    prompts = _read_tei(model, job, fields, embedding, PoolingParams(output="embed_sparse"))
    return PreparedEmbeddings.of("embed", prompts, job, fields, "inputs")


def prepare_embed_all(model: ServedModel, job: Job) -> PreparedEmbeddings:
    """Prepare a body of /embed_all. Raises InvalidRequest or UnknownModel."""
    fields = parse_body(model, EmbedAllRequest, job.body)
    embedding = check_output("embed_all", EmbeddingFacts.read(job.facts))
    prompts = _read_tei(model, job, fields, embedding, PoolingParams(output="embed_all"))
    _check_tokens(prompts, embedding.hidden_size, "inputs")
    return PreparedEmbeddings.of("embed", prompts, job, fields, "inputs", vector_size=embedding.hidden_size)


def _read_tei(
    model: ServedModel, job: Job, fields: EmbedSparseRequest, embedding: EmbeddingFacts, params: PoolingParams
) -> list[Prompt]:
    """Read the inputs of a path of text-embeddings-inference. Raises InvalidRequest."""
    number = len(fields.inputs)
    check_num_inputs(number, "inputs")
    truncation, begin = fields.truncation(job.facts.max_model_len), _find_instruction(fields.prompt_name, embedding)
    payload, prompts = params.encode(), []
    encoding = find_encoding(fields.prompt_name, embedding) if params.output == "embed_all" else None
    for index in range(number):
        text, param = fields.inputs[index], name_input("inputs", index, number)
        if encoding is not None:
            prompts.append(encode_tokens(model, job, text, param, encoding, begin, params, truncation))
            continue
        whole = begin + text if isinstance(text, str) else text
        tokens = read_input(model, whole, truncation, job.facts, param)
        prompts.append(_build_prompt(tokens, payload, embedding))
    return prompts


def _check_tokens(prompts: list[Prompt], size: int, param: str) -> None:
    """Raise InvalidRequest if vectors of `size` numbers for all tokens are too large for one answer."""
    check_answer_size(sum(len(each.token_ids) for each in prompts), size, "numbers for each", param, "tokens")


class PreparedCosines(PreparedComparison, frozen=True, kw_only=True, array_like=True):
    """A valid request, with a prompt for each text: the first texts, then the second texts.

    With a ColBERT model, the engine itself scores each second text, and there is a prompt for each of them.
    """

    num_first: int  # 0: results are scores


def prepare_cosines(model: ServedModel, job: Job, comparison: Comparison) -> PreparedCosines:
    """Prepare a comparison, one engine request for each text or pair. Raises InvalidRequest or UnknownModel."""
    comparison.refuse_instruction()
    embedding, truncation = EmbeddingFacts.read(job.facts), comparison.truncation(job)
    cut = truncation
    if (most := comparison.max_second_tokens) is not None:
        cut = Truncation(min(most, job.facts.max_model_len if truncation is None else truncation.max_tokens), "right")
    if "embed" not in embedding.outputs and {"query", "document"} <= embedding.encodings.keys():
        pairs = encode_pairs(model, job, comparison, embedding, truncation, cut)
        return PreparedCosines.of_comparison(comparison, pairs, job, num_first=0)
    first, second = comparison.first, comparison.second
    _check_size(job, len(first) + len(second), None, comparison.params[1].partition("[")[0])
    begin, payload = _find_instruction(None, embedding), PoolingParams(normalizes=True).encode()
    prompts = [
        _build_prompt(read_input(model, begin + text, how, job.facts, param.format(index)), payload, embedding)
        for texts, how, param in ((first, truncation, comparison.params[0]), (second, cut, comparison.params[1]))
        for index, text in enumerate(texts)
    ]
    return PreparedCosines.of_comparison(comparison, prompts, job, num_first=len(first))


def _check_size(job: Job, number: int, dimensions: int | None, param: str) -> EmbeddingFacts:
    """Raise InvalidRequest if the model has no vectors of this size, or the response would be too large."""
    embedding = check_output("embed", EmbeddingFacts.read(job.facts))
    _check_dimensions(dimensions, embedding)
    check_answer_size(number, dimensions or embedding.size, "dimensions", param)
    return embedding


def _build_prompt(tokens: list[int], payload: bytes, embedding: EmbeddingFacts) -> Prompt:
    return Prompt(tokens, payload, max(0, embedding.padded_tokens - len(tokens)))


def _read_pictures(
    model: ServedModel, fields: EmbeddingRequest, embedding: EmbeddingFacts, params: PoolingParams
) -> list[Prompt]:
    if embedding.pictures is None:
        raise InvalidRequest("modality is 'image', and this model embeds texts only", param="modality")
    if fields.messages is not None:
        raise InvalidRequest("modality is 'image': send the images as `input`, not as messages", param="messages")
    number, texts = len(fields.input), [text for text in fields.input if isinstance(text, str)]
    if len(texts) < number:
        raise InvalidRequest("input has token ids: with modality 'image' send data: URIs with base64", param="input")
    if number > IMAGES_MAX:
        raise InvalidRequest(f"input has {number} images; at most {IMAGES_MAX} are allowed", param="input")
    return [
        _read_picture(model, embedding.pictures, data, name_input("input", index, number), params)
        for index, data in enumerate(read_files(texts, "input"))
    ]


def _read_picture(model: ServedModel, facts: PictureFacts, data: bytes, param: str, params: PoolingParams) -> Prompt:
    pixels = process_picture(model, data, param)
    if pixels.shape != facts.shape:
        made = " x ".join(map(str, pixels.shape))
        raise InvalidRequest(f"{param} becomes {made}, and the model takes only squares: send a square", param=param)
    payload = msgspec.structs.replace(params, pixels=pixels.tobytes()).encode()
    return Prompt([], payload, facts.num_tokens, facts.num_tokens)


def _find_instruction(name: str | None, embedding: EmbeddingFacts) -> str:
    """Return the text that is put in front of each text, as in sentence-transformers. Token ids get none."""
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


TASK: Final[Mapping[str, BodyKind]] = {
    **TOKEN_KINDS,
    "embedding": BodyKind(prepare_embeddings, PreparedEmbeddings),
    "embedding_of_images": build_kind(prepare_embeddings, PreparedEmbeddings, has_images),
    "pooling": BodyKind(prepare_pooling, PreparedEmbeddings),
    "embed": BodyKind(prepare_embed, PreparedEmbeddings),
    "embed_sparse": BodyKind(prepare_embed_sparse, PreparedEmbeddings),
    "embed_all": BodyKind(prepare_embed_all, PreparedEmbeddings),
    **build_kinds(prepare_cosines, PreparedCosines),
}
