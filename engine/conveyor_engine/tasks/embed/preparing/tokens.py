"""What requests can get of a model that embeds, and the tokens of a ColBERT model's queries and documents.

Runs in worker processes.
"""

from typing import Final

import msgspec

from conveyor_engine.errors import ErrorCode, InvalidRequest
from conveyor_engine.serving.preparing.jobs import ServedModel
from conveyor_engine.serving.preparing.prompts import Prompt, check_input, read_input
from conveyor_engine.tasks.embed.facts import EmbeddingFacts, Output, PoolingParams, TokenEncoding
from conveyor_engine.text.tokenizer import Truncation
from conveyor_engine.wire.worker import Job

POOLING_TASKS: Final[tuple[Output, ...]] = ("embed", "token_embed", "token_classify")
_WHAT: Final[dict[Output, str]] = {
    "embed": "vectors of whole texts",
    "token_embed": "vectors of tokens",
    "token_classify": "weights of tokens",
    "embed_sparse": "sparse vectors",
    "embed_all": "hidden states of tokens",
}
_WHERE: Final[dict[Output, str]] = {
    "embed": "/v1/embeddings",
    "token_embed": "/pooling with task token_embed",
    "token_classify": "/pooling with task token_classify",
    "embed_sparse": "/embed_sparse",
    "embed_all": "/embed_all",
}


def check_output(output: Output, embedding: EmbeddingFacts, param: str | None = None) -> EmbeddingFacts:
    """Return the facts. Raises InvalidRequest if the model does not have this output."""
    if output not in embedding.outputs:
        has = ", ".join(f"{_WHAT[each]} ({_WHERE[each]})" for each in embedding.outputs)
        message = f"this model makes no {_WHAT[output]}, according to its files; it makes {has}"
        raise InvalidRequest(message, param=param, code=ErrorCode.WRONG_TASK)
    return embedding


def find_encoding(name: str | None, embedding: EmbeddingFacts) -> TokenEncoding | None:
    """Return how texts with this instruction become tokens; None if they do as other texts."""
    return embedding.encodings.get(embedding.default_instruction if name is None else name)


def encode_tokens(
    model: ServedModel,
    job: Job,
    given: str | list[int],
    param: str,
    encoding: TokenEncoding,
    begin: str,
    params: PoolingParams,
    truncation: Truncation | None,
) -> Prompt:
    """Make the prompt of a query or a document. Token ids of the client are only truncated. Raises InvalidRequest.

    param: the name of the input in errors. begin: the text in front of it. truncation: what the request sets.
    """
    if not isinstance(given, str):
        return Prompt(read_input(model, given, truncation, job.facts, param), params.encode())
    params = msgspec.structs.replace(params, drops_skiplist=encoding.drops_skiplist)
    token_ids = read_input(model, begin + given, _find_truncation(encoding, truncation, job), job.facts, param)
    if encoding.marker is not None:
        token_ids.insert(1, encoding.marker)
    missing = encoding.num_tokens - len(token_ids)
    if missing > 0:
        if not encoding.attends:
            params = msgspec.structs.replace(params, num_keys=len(token_ids))
        token_ids += [encoding.filler] * missing
    check_input(token_ids, job.facts, param)
    return Prompt(token_ids, params.encode())


def _find_truncation(encoding: TokenEncoding, asked: Truncation | None, job: Job) -> Truncation | None:
    """Return how a text is truncated in front of the marker: to the smaller limit of the files and of the request."""
    limits = [each for each in (encoding.max_tokens, asked.max_tokens if asked else 0) if each]
    if not limits:
        return None
    room = min(*limits, job.facts.max_model_len) - int(encoding.marker is not None)
    return Truncation(max(0, room), asked.side if asked else "right")
