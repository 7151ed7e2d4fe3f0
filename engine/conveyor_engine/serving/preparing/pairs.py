"""Turns pairs of texts into prompts, for tasks whose models read two texts at once."""

from collections.abc import Sequence

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.serving.preparing.bounds import check_token_ids
from conveyor_engine.serving.preparing.jobs import ServedModel
from conveyor_engine.serving.preparing.prompts import Prompt
from conveyor_engine.text.pairs import Pair, PairEncoder
from conveyor_engine.text.tokenizer import Truncation
from conveyor_engine.wire.classification import ClassifierFacts, encode_token_types
from conveyor_engine.wire.request import ModelFacts


def encode_pairs(
    model: ServedModel,
    facts: ModelFacts,
    pairs: Sequence[tuple[str, str]],
    params: tuple[str, str],
    truncation: Truncation | None,
    max_second_tokens: int | None = None,
) -> list[Prompt]:
    """Return a prompt for each pair. Raises InvalidRequest.

    params: the fields of the first and the second text; `{}` in the latter is replaced by the index of the pair.
    If consecutive pairs have the same object as their first text, it is tokenized once for all of them.
    """
    num_types = ClassifierFacts.read(facts).num_token_types
    prompts, encoder, shared = [], None, None
    for number, (first, second) in enumerate(pairs):
        if encoder is None or first is not shared:
            encoder = PairEncoder(model.tokenizer, first, facts.max_model_len, param=params[0], truncation=truncation)
            shared = first
        param = params[1].format(number)
        pair = encoder.encode(second, param=param, max_second_tokens=max_second_tokens)
        check_token_ids(pair.token_ids, facts, param)
        prompts.append(Prompt(pair.token_ids, _encode_types(pair, num_types)))
    return prompts


def _encode_types(pair: Pair, num_types: int) -> bytes:
    """Return the token types as a payload; empty for a model with one token type."""
    if num_types == 1:
        return b""
    if max(pair.token_types) >= num_types:
        message = f"the tokenizer.json gives tokens the type {max(pair.token_types)}, which the model does not have"
        raise InvalidRequest(message)
    return encode_token_types(pair.token_types)
