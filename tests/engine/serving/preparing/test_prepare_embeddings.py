"""Tests how bodies of /v1/embeddings become engine requests, without processes."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.engine.builders import make_facts

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.serving.preparing.jobs import ServedModel
from conveyor_engine.serving.preparing.sampling_defaults import SamplingDefaults
from conveyor_engine.tasks.embed.facts import EmbeddingFacts
from conveyor_engine.tasks.embed.preparing import PreparedEmbeddings, prepare_embeddings
from conveyor_engine.text.tokenizer import Tokenizer
from conveyor_engine.wire.frames import FrameReader
from conveyor_engine.wire.messages import Add, to_engine_decoder
from conveyor_engine.wire.request import EngineRequest
from conveyor_engine.wire.worker import INPUTS_MAX, Job, Part


def prepared(chat_model: Path, **fields: Any) -> PreparedEmbeddings:
    model = ServedModel("tiny", Tokenizer(chat_model), SamplingDefaults())
    embedding = EmbeddingFacts(size=4096, is_matryoshka=True)
    facts = make_facts(task="embed", vocab_size=384, of_task=embedding.encode())
    return prepare_embeddings(model, Job("embedding", facts, 100_000, 0.0, json.dumps(fields).encode()))


def requests_of(part: Part) -> list[EngineRequest]:
    """Return the requests as the engine process reads them."""
    (payload,) = FrameReader().feed(part.add)
    add = to_engine_decoder.decode(payload)
    assert isinstance(add, Add)
    return add.requests(0.0)


def test_each_input_has_the_level_of_its_request(chat_model: Path) -> None:
    (part,) = prepared(chat_model, input=[[7], [8]], priority=7).parts
    assert [request.level for request in requests_of(part)] == [7, 7]


def test_a_list_is_split_into_parts_of_a_batch_which_are_one_party(chat_model: Path) -> None:
    lists = [prepared(chat_model, input=[[7 + number] for number in range(10)]) for _ in range(2)]
    assert [len(part.num_tokens_of) for part in lists[0].parts] == [4, 4, 2], "of four rows"
    requests = [request for part in lists[0].parts for request in requests_of(part)]
    assert [request.request_id for request in requests] == lists[0].request_ids
    assert [list(request.prompt_token_ids) for request in requests] == [[7 + number] for number in range(10)]
    parties = [{r.party for part in each.parts for r in requests_of(part)} for each in lists]
    assert [len(party) for party in parties] == [1, 1]
    assert parties[0] != parties[1]


def test_an_input_of_a_list_that_is_refused_is_named(chat_model: Path) -> None:
    for value, param in (([[7], [8], [999]], "input[2]"), ([[999]], "input"), (["a", "a " * 500], "input[1]")):
        with pytest.raises(InvalidRequest) as caught:
            prepared(chat_model, input=value)
        assert caught.value.param == param


@pytest.mark.slow
def test_a_body_has_a_bounded_number_of_inputs(chat_model: Path) -> None:
    assert len(prepared(chat_model, input=[[7]] * INPUTS_MAX, dimensions=8).request_ids) == INPUTS_MAX
    with pytest.raises(InvalidRequest, match="is 8193, more than the 8192 that one request may have") as caught:
        prepared(chat_model, input=[[7]] * (INPUTS_MAX + 1), dimensions=8)
    assert caught.value.param == "input"


def test_more_vectors_than_one_answer_may_have_are_refused_before_they_are_computed(chat_model: Path) -> None:
    """They were all computed, then refused with 429 as if another try could help."""
    assert len(prepared(chat_model, input=[[7]] * 4096).request_ids) == 4096
    with pytest.raises(InvalidRequest, match="4097 inputs are more than the 4096") as caught:
        prepared(chat_model, input=[[7]] * 4097)
    assert caught.value.param == "input"
    assert len(prepared(chat_model, input=[[7]] * 8192, dimensions=2048).request_ids) == 8192
