"""Tests that pairs of a ColBERT model have the MaxSim of its definition, whatever shares the step."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.embedding_cores import make_core, run
from tests.engine.token_models import score_by_hand, write_colbert

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.serving.preparing.jobs import ServedModel, find_kind
from conveyor_engine.serving.preparing.sampling_defaults import SamplingDefaults
from conveyor_engine.tasks.embed.execution import heads
from conveyor_engine.tasks.embed.facts import RESULT_MARK, PoolingParams
from conveyor_engine.tasks.embed.preparing import PreparedCosines
from conveyor_engine.text.tokenizer import Tokenizer
from conveyor_engine.wire.frames import FrameReader
from conveyor_engine.wire.messages import Add, to_engine_decoder
from conveyor_engine.wire.request import EngineRequest
from conveyor_engine.wire.worker import Job

QUERIES = ["the fox!", "a long day " * 9]
DOCUMENTS = ["the fox! a day. " * 3, "", "lazy", "the quick brown fox", "!. " * 4]


def prepare(core: EngineCore, directory: Path, kind: str, **body: Any) -> PreparedCosines:
    job = Job(kind, core.executor.facts, 1000, 0.0, json.dumps(body).encode())
    prepared = find_kind(job).prepare(ServedModel("m", Tokenizer(directory), SamplingDefaults()), job)
    assert isinstance(prepared, PreparedCosines)
    return prepared


def requests_of(prepared: PreparedCosines) -> list[EngineRequest]:
    adds = [to_engine_decoder.decode(frame) for part in prepared.parts for frame in FrameReader().feed(part.add)]
    return [request for add in adds if isinstance(add, Add) for request in add.requests(0.0)]


def compute(core: EngineCore, *prepared: PreparedCosines) -> list[float]:
    """Run all requests at once."""
    for request in (request for each in prepared for request in requests_of(each)):
        core.add_request(request)
    outputs = run(core)
    found = [outputs[request_id].payload or b"" for each in prepared for request_id in each.request_ids]
    assert all(payload[:1] == RESULT_MARK for payload in found)
    return [torch.frombuffer(bytearray(payload[1:]), dtype=torch.float32).item() for payload in found]


@pytest.mark.parametrize(("kind", "files"), [("bert", "pylate"), ("modernbert", "native"), ("bert", "stanford")])
def test_scores_are_those_of_the_definition_in_one_step(tmp_path: Path, kind: str, files: str) -> None:
    model, linear = write_colbert(kind, tmp_path, files)
    core = make_core(tmp_path, max_num_batched_tokens=2000, max_num_seqs=16)
    ranked = prepare(core, tmp_path, "rerank", query=QUERIES[0], documents=DOCUMENTS)
    pairs = prepare(core, tmp_path, "score", text_1=QUERIES, text_2=DOCUMENTS[:2])
    expected = [score_by_hand(model, linear, tmp_path, (QUERIES[0], each), files) for each in DOCUMENTS]
    expected += [score_by_hand(model, linear, tmp_path, each, files) for each in zip(QUERIES, DOCUMENTS, strict=False)]
    assert compute(core, ranked, pairs) == pytest.approx(expected, abs=1e-4)
    assert core.stats().num_steps == 1
    assert max(expected) - min(expected) > 0.01, "the check can fail"


def test_a_query_of_several_documents_is_computed_once_in_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_colbert("bert", tmp_path, "pylate")
    core = make_core(tmp_path, max_num_batched_tokens=2000, max_num_seqs=16)
    encode, seen = core.executor._encode, []  # type: ignore[attr-defined]
    monkeypatch.setattr(
        core.executor, "_encode", lambda texts, **rest: (seen.append(len(texts)), encode(texts, **rest))[1]
    )
    once = compute(core, prepare(core, tmp_path, "rerank", query=QUERIES[0], documents=DOCUMENTS))
    assert seen == [len(DOCUMENTS) + 1]
    monkeypatch.setattr(heads, "_LOGITS_MAX", 40)  # products in parts
    assert compute(core, prepare(core, tmp_path, "rerank", query=QUERIES[0], documents=DOCUMENTS)) == pytest.approx(
        once
    )


def test_limits_of_the_request_cut_and_too_long_pairs_are_refused(tmp_path: Path) -> None:
    write_colbert("bert", tmp_path, "pylate")
    core = make_core(tmp_path, max_num_batched_tokens=60, max_num_seqs=16, max_model_len=50)
    short = prepare(core, tmp_path, "rerank", query="the fox", documents=DOCUMENTS[:1], max_tokens_per_doc=7)
    (request,) = requests_of(short)
    query = PoolingParams.read(request.payload).query
    assert query is not None
    assert len(request.prompt_token_ids) == 7
    assert request.payload_cost == len(query.token_ids) == 24
    assert short.nums_prompt_tokens == [7 + 24]
    long = {"query": "the fox", "documents": ["a day. " * 99]}
    assert [len(each.prompt_token_ids) for each in requests_of(prepare(core, tmp_path, "rerank", **long))] == [30]
    core = make_core(tmp_path, max_num_batched_tokens=50, max_num_seqs=16, max_model_len=50)
    with pytest.raises(InvalidRequest, match="maximum context length is 50") as refused:
        prepare(core, tmp_path, "rerank", **long)
    assert refused.value.param == "documents[0]"
    (request,) = requests_of(prepare(core, tmp_path, "rerank", truncate_prompt_tokens=-1, **long))
    assert len(request.prompt_token_ids) == 50 - 24, "the request truncates"


def test_a_document_without_vectors_scores_0() -> None:
    assert heads.compute_max_sim(torch.ones(3, 2), torch.ones(0, 2)).tolist() == [0]
