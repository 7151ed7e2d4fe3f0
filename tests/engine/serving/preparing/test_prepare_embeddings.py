"""From a body of /v1/embeddings to engine requests, without processes."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.engine.builders import make_facts

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.serving.preparing.jobs import ServedModel
from conveyor_engine.serving.preparing.sampling_defaults import SamplingDefaults
from conveyor_engine.tasks.embed.preparing import PreparedEmbeddings, prepare_embeddings
from conveyor_engine.text.tokenizer import Tokenizer
from conveyor_engine.wire.embedding import EmbeddingFacts
from conveyor_engine.wire.frames import FrameReader
from conveyor_engine.wire.messages import Add, to_engine_decoder
from conveyor_engine.wire.worker import Job


def prepared(chat_model: Path, **fields: Any) -> PreparedEmbeddings:
    model = ServedModel("tiny", Tokenizer(chat_model), SamplingDefaults())
    embedding = EmbeddingFacts(size=4096, is_matryoshka=True)
    facts = make_facts(task="embed", vocab_size=384, of_task=embedding.encode())
    return prepare_embeddings(model, Job("embedding", facts, 100_000, 0.0, json.dumps(fields).encode()))


def test_each_input_has_the_level_of_its_request(chat_model: Path) -> None:
    (payload,) = FrameReader().feed(prepared(chat_model, input=[[7], [8]], priority=7).add)
    add = to_engine_decoder.decode(payload)
    assert isinstance(add, Add)
    assert [request.level for request in add.requests(0.0)] == [7, 7]


def test_more_vectors_than_one_answer_may_have_are_refused_before_they_are_computed(chat_model: Path) -> None:
    """They were all computed, then refused with 429 as if another try could help."""
    assert len(prepared(chat_model, input=[[7]] * 4096).request_ids) == 4096
    with pytest.raises(InvalidRequest, match="4097 inputs are more than the 4096") as caught:
        prepared(chat_model, input=[[7]] * 4097)
    assert caught.value.param == "input"
    assert len(prepared(chat_model, input=[[7]] * 8192, dimensions=2048).request_ids) == 8192
