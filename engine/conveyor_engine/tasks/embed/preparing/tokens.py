"""What requests can get of a model that embeds, and the tokens of a ColBERT model's queries and documents.

Runs in worker processes.
"""

from typing import Final

import msgspec

from conveyor_engine.errors import ErrorCode, InvalidRequest
from conveyor_engine.serving.preparing.comparing import Comparison
from conveyor_engine.serving.preparing.jobs import ServedModel
from conveyor_engine.serving.preparing.prompts import Prompt, check_input, read_input
from conveyor_engine.tasks.embed.facts import (
    WHAT,
    EmbeddingFacts,
    Output,
    PoolingParams,
    QueryTokens,
    TokenEncoding,
    describe_outputs,
)
from conveyor_engine.text.tokenizer import Truncation, too_long
from conveyor_engine.wire.worker import Job

POOLING_TASKS: Final[tuple[Output, ...]] = ("embed", "token_embed", "token_classify")


def check_output(output: Output, embedding: EmbeddingFacts, param: str | None = None) -> EmbeddingFacts:
    """Return the facts. Raises InvalidRequest if the model does not have this output."""
    if output not in embedding.outputs:
        has = describe_outputs(embedding.outputs)
        message = f"this model makes no {WHAT[output]}, according to its files; it makes {has}"
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


def encode_pairs(
    model: ServedModel,
    job: Job,
    comparison: Comparison,
    embedding: EmbeddingFacts,
    truncation: Truncation | None,
    cut: Truncation | None,
) -> list[Prompt]:
    """Make a prompt for each document of a comparison. Its payload has the query. Raises InvalidRequest.

    truncation, cut: what the request sets for queries and for documents.
    """

    def encode(role: str, text: str, param: str, how: Truncation | None) -> tuple[list[int], PoolingParams]:
        begin, params = embedding.instructions.get(role, ""), PoolingParams(output="token_embed")
        prompt = encode_tokens(model, job, text, param, embedding.encodings[role], begin, params, how)
        return prompt.token_ids, PoolingParams.read(prompt.payload)

    queries = []
    for index, text in enumerate(comparison.first):
        token_ids, params = encode("query", text, comparison.params[0].format(index), truncation)
        queries.append(QueryTokens(tuple(token_ids), params.num_keys, params.drops_skiplist))
    queries = queries * len(comparison.second) if len(queries) == 1 else queries
    prompts, most = [], max(job.facts.max_model_len, job.facts.max_num_batched_tokens)
    for index, (query, text) in enumerate(zip(queries, comparison.second, strict=True)):
        param, of_query = comparison.params[1].format(index), len(query.token_ids)
        how = cut and Truncation(max(1, min(cut.max_tokens, most - of_query)), cut.side)
        token_ids, params = encode("document", text, param, how)
        if len(token_ids) + of_query > most:  # both are in one step
            raise too_long(len(token_ids) + of_query, most, param)
        payload = msgspec.structs.replace(params, query=query).encode()
        prompts.append(Prompt(token_ids, payload, of_query, of_query))
    return prompts


def _find_truncation(encoding: TokenEncoding, asked: Truncation | None, job: Job) -> Truncation | None:
    """Return how a text is truncated in front of the marker: to the smaller limit of the files and of the request."""
    limits = [each for each in (encoding.max_tokens, asked.max_tokens if asked else 0) if each]
    if not limits:
        return None
    room = min(*limits, job.facts.max_model_len) - int(encoding.marker is not None)
    return Truncation(max(0, room), asked.side if asked else "right")
