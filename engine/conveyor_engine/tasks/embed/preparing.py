"""Makes engine requests of a body of /v1/embeddings, one for each input. Runs in the workers of `preparing.process`."""

import uuid
from collections.abc import Mapping
from typing import Final

import msgspec

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.serving.preparing.jobs import Kind, ServedModel, parse_body, too_many
from conveyor_engine.serving.preparing.prepare import check_token_ids, read_prompt
from conveyor_engine.serving.preparing.schemas import EmbeddingRequest
from conveyor_engine.text.tokenizer import Truncation, too_long
from conveyor_engine.wire.embedding import EmbeddingFacts, PoolingParams
from conveyor_engine.wire.frames import encode_frame
from conveyor_engine.wire.messages import Add
from conveyor_engine.wire.request import EngineRequest, ModelFacts
from conveyor_engine.wire.worker import Job

VECTOR_BYTES_MAX = 64 << 20  # of one request, float32: half of what the API process holds for all of its clients
_PARAM = "input"


class PreparedEmbeddings(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An admissible request, in the inputs' order."""

    id: str
    request_ids: list[str]
    nums_prompt_tokens: list[int]
    arrival_time: float
    as_base64: bool
    ignored_fields: int
    add: bytes  # the message for the engine, encoded

    @property
    def num_tokens_of(self) -> dict[str, int]:
        """By the id of each engine request, the tokens of its prompt."""
        return dict(zip(self.request_ids, self.nums_prompt_tokens, strict=True))


def prepare_embeddings(model: ServedModel, job: Job) -> PreparedEmbeddings:
    """Raises InvalidRequest or UnknownModel."""
    fields = parse_body(model, EmbeddingRequest, job.body)
    if len(fields.input) > job.num_requests_max:
        raise too_many("the number of inputs", len(fields.input), job, _PARAM)
    embedding = EmbeddingFacts.read(job.facts)
    _check_dimensions(fields.dimensions, embedding)
    _check_size(len(fields.input), fields.dimensions or embedding.size)
    truncation = fields.truncation(job.facts.max_model_len)
    prompts = [_read_input(model, text, truncation, job.facts) for text in fields.input]
    request_id = f"embd-{uuid.uuid4().hex}"
    payload = PoolingParams(dimensions=fields.dimensions).encode()
    requests = [
        EngineRequest(
            request_id=f"{request_id}-{number}",
            prompt_token_ids=prompt,
            payload=payload,
            level=job.find_level(fields.priority),
            deadline=job.deadline,
            arrival_time=job.arrival_time,
        )
        for number, prompt in enumerate(prompts)
    ]
    return PreparedEmbeddings(
        id=request_id,
        request_ids=[request.request_id for request in requests],
        nums_prompt_tokens=list(map(len, prompts)),
        arrival_time=job.arrival_time,
        as_base64=fields.encoding_format == "base64",
        ignored_fields=fields.ignored,
        add=encode_frame(Add.of(requests)),
    )


def _read_input(
    model: ServedModel, text: str | list[int], truncation: Truncation | None, facts: ModelFacts
) -> list[int]:
    """The input's tokens; a text's with those that the model's tokenizer puts around it."""
    prompt = read_prompt(model, text, truncation, facts, _PARAM)
    check_token_ids(prompt, facts, _PARAM)
    if len(prompt) > facts.max_model_len:
        raise too_long(len(prompt), facts.max_model_len, _PARAM)
    return prompt


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


def _check_size(num_inputs: int, size: int) -> None:
    """Refuses more vectors than one answer may hold, before they are computed."""
    most = VECTOR_BYTES_MAX // (4 * size)
    if num_inputs > most:
        message = f"{num_inputs} inputs are more than the {most} that one answer may have with {size} dimensions"
        raise InvalidRequest(f"{message}; send fewer at a time", param=_PARAM)


TASK: Final[Mapping[str, Kind]] = {"embedding": Kind(prepare_embeddings, PreparedEmbeddings)}
