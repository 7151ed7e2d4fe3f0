"""Tests that sparse vectors and vectors of tokens are those of the models' definitions within 1e-4, in every batch."""

import json
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.embedding_cores import make_core, run
from tests.engine.encoders import SIZE, embed, write_served_encoder
from tests.engine.token_models import (
    DOCUMENT_TOKENS,
    MASK,
    TOKEN_SIZE,
    encode_by_hand,
    late_vectors,
    splade,
    write_colbert,
    write_m3,
    write_splade,
)
from torch import nn

from conveyor_engine.errors import InvalidRequest, ModelError
from conveyor_engine.execution import machine
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.tasks.embed.execution import heads, pooling
from conveyor_engine.tasks.embed.execution.pooling import encode_splade
from conveyor_engine.tasks.embed.facts import SPARSE_NUMBERS_MAX, TOO_DENSE, EmbeddingFacts, PoolingParams
from conveyor_engine.tasks.embed.preparing.tokens import check_output, encode_tokens
from conveyor_engine.text.tokenizer import Tokenizer, Truncation
from conveyor_engine.wire.request import EngineRequest

PROMPTS = [[Random(length).randrange(3, 200) for _ in range(length)] for length in (1, 9, 3, 30, 17, 2)]
SPARSE = PoolingParams(output="embed_sparse")
Asked = tuple[list[int], PoolingParams]


def facts_of(core: EngineCore) -> EmbeddingFacts:
    return EmbeddingFacts.read(core.executor.facts)


def compute(core: EngineCore, asked: list[Asked]) -> list[bytes]:
    for number, (token_ids, params) in enumerate(asked):
        request = EngineRequest(request_id=str(number), prompt_token_ids=token_ids, payload=params.encode())
        core.add_request(request)
    outputs = run(core)
    assert {output.finish_reason for output in outputs.values()} == {"stop"}
    return [outputs[str(number)].payload or b"" for number in range(len(asked))]


def many_of(payload: bytes, size: int = 1) -> torch.Tensor:
    return torch.frombuffer(bytearray(payload[1:]), dtype=torch.float32).view(-1, size)


def sparse_of(payload: bytes, size: int) -> torch.Tensor:
    """Return the dense row. The indices ascend, and no weight is zero."""
    middle = 1 + (len(payload) - 1) // 2
    indices, weights = np.frombuffer(payload[1:middle], np.uint32), np.frombuffer(payload[middle:], np.float32)
    assert (np.diff(indices.astype(np.int64)) > 0).all()
    assert (weights != 0).all()
    row = np.zeros(size, np.float32)
    row[indices] = weights
    return torch.tensor(row)


def distance(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    assert [each.shape for each in ours] == [each.shape for each in theirs]
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True) if a.numel())


SPLADES = [("bert", "max", "relu"), ("xlm-roberta", "sum", "log1p_relu"), ("modernbert", "max", "log1p_relu")]
COLBERTS = [
    ("bert", "pylate", False, "auto"),
    ("bert", "stanford", False, "torch"),
    ("bert", "native", True, "auto"),
    ("modernbert", "pylate", False, "auto"),
    ("modernbert", "native", False, "torch"),
]
FAMILIES_OF = {
    "SPLADE": {each[0] for each in SPLADES},
    "ColBERT": {each[0] for each in COLBERTS},
    "BGE-M3": {"xlm-roberta"},
}


@pytest.mark.parametrize(("kind", "strategy", "activation"), SPLADES)
def test_sparse_vectors_are_splade_s_however_logits_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, strategy: str, activation: str
) -> None:
    model = write_splade(kind, tmp_path, strategy, activation)
    expected = [splade(model, prompt, strategy, activation) for prompt in PROMPTS]
    for logits_max in (1 << 24, 5 * len(expected[0]), 1):
        monkeypatch.setattr(heads, "_LOGITS_MAX", logits_max)
        core = make_core(tmp_path, max_num_batched_tokens=400, max_num_seqs=8)
        assert facts_of(core).outputs == ("embed_sparse",)
        payloads = compute(core, [(prompt, PoolingParams(output="embed_sparse")) for prompt in PROMPTS])
        assert distance([sparse_of(payload, len(expected[0])) for payload in payloads], expected) < 1e-4


def test_a_masked_model_without_other_files_makes_vectors_too(tmp_path: Path) -> None:
    model = write_splade("bert", tmp_path, named=False)
    core = make_core(tmp_path, max_num_batched_tokens=400, max_num_seqs=8)
    assert facts_of(core).outputs == ("embed", "token_embed", "embed_all", "embed_sparse")
    asked = [(PROMPTS[1], PoolingParams()), (PROMPTS[3], PoolingParams(output="embed_sparse"))]
    vector, sparse = compute(core, asked)
    row = splade(model, PROMPTS[3])
    assert distance([sparse_of(sparse, len(row))], [row]) < 1e-4
    whole = embed(model.base_model, PROMPTS[1], "pooling_mode_mean_tokens", normalizes=True)
    assert distance([torch.frombuffer(bytearray(vector), dtype=torch.float32)], [whole]) < 1e-4


def test_all_outputs_of_one_model_share_a_step(tmp_path: Path) -> None:
    """bge-m3: one forward for a batch whose requests want different outputs."""
    model, sparse, tokens = write_m3(tmp_path)
    core = make_core(tmp_path, max_num_batched_tokens=400, max_num_seqs=8)
    assert facts_of(core).outputs == ("embed", "token_embed", "token_classify", "embed_all", "embed_sparse")
    names = ("embed", "token_embed", "token_classify", "embed_all", "embed_sparse", "token_embed")
    end, begin = Tokenizer(tmp_path).find_special_id("eos_token"), Tokenizer(tmp_path).find_id(MASK)
    assert end is not None
    assert begin is not None
    prompts = [[begin, *prompt, prompt[0], end] for prompt in PROMPTS]
    asked: list[Any] = [(prompt, PoolingParams(output=name)) for prompt, name in zip(prompts, names, strict=True)]
    payloads = compute(core, asked)
    assert core.stats().num_steps == 1
    with torch.inference_mode():
        hidden = [model(input_ids=torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]
        weights = [sparse(states).relu()[:, 0] for states in hidden]
    row = torch.zeros(300)
    for token, weight in zip(prompts[4], weights[4], strict=True):
        row[token] = max(row[token], weight) if token not in (begin, end) else 0
    assert distance([sparse_of(payloads[4], 300)], [row]) < 1e-4
    vectors = [late_vectors(model, tokens, prompts[index])[1:] for index in (1, 5)]  # FlagEmbedding drops the first
    assert distance([many_of(payloads[index], TOKEN_SIZE) for index in (1, 5)], vectors) < 1e-4
    assert distance([many_of(payloads[2])[:, 0]], [weights[2][1:-1]]) < 1e-4
    assert distance([many_of(payloads[3], SIZE)], [hidden[3]]) < 1e-4
    assert distance([torch.frombuffer(bytearray(payloads[0]), dtype=torch.float32)], [_normal(hidden[0][0])]) < 1e-4


def _normal(vector: torch.Tensor) -> torch.Tensor:
    return nn.functional.normalize(vector, dim=0)


@pytest.mark.parametrize(("kind", "files", "attends", "backend"), COLBERTS)
def test_queries_and_documents_are_those_of_their_files(
    tmp_path: Path, kind: str, files: str, attends: bool, backend: str
) -> None:
    model, linear = write_colbert(kind, tmp_path, files, attends=attends)
    core = make_core(tmp_path, max_num_batched_tokens=400, max_num_seqs=8, attention_backend=backend)
    facts, tokenizer = facts_of(core), Tokenizer(tmp_path)
    assert facts.outputs == ("token_embed", "embed_all")
    asked, expected = [], []
    for role, text in (("query", "the fox!"), ("document", "the fox! a day. " * 3), ("query", "a long day " * 9)):
        asked.append(_encode(core, tokenizer, text, role))
        ids, num_keys, kept = encode_by_hand(tokenizer, text, role, files)
        expected.append(late_vectors(model, linear, ids, None if attends else num_keys)[kept])
    payloads = compute(core, asked)
    assert distance([many_of(payload, TOKEN_SIZE) for payload in payloads], expected) < 1e-4
    if not attends:  # the check can fail: with all tokens as keys, the vectors differ
        ids, _, kept = encode_by_hand(tokenizer, "the fox!", "query", files)
        assert distance([many_of(payloads[0], TOKEN_SIZE)], [late_vectors(model, linear, ids)[kept]]) > 1e-2


def _encode(core: EngineCore, tokenizer: Tokenizer, text: str, role: str) -> Asked:
    facts, model_facts = facts_of(core), core.executor.facts
    model: Any = SimpleNamespace(tokenizer=tokenizer)
    job: Any = SimpleNamespace(facts=model_facts)
    begin, params = facts.instructions[role], PoolingParams(output="token_embed")
    prompt = encode_tokens(model, job, text, "input", facts.encodings[role], begin, params, None)
    return prompt.token_ids, PoolingParams.read(prompt.payload)


def test_tokens_of_other_models_get_their_hidden_states_of_length_1(tmp_path: Path) -> None:
    model = write_served_encoder("bert", tmp_path)
    core = make_core(tmp_path, max_num_batched_tokens=400)
    assert facts_of(core).outputs == ("embed", "token_embed", "embed_all")
    scaled = PoolingParams(output="token_embed")
    whole, raw = compute(core, [(PROMPTS[1], scaled), (PROMPTS[1], PoolingParams(output="embed_all"))])
    with torch.inference_mode():
        hidden = model(input_ids=torch.tensor([PROMPTS[1]])).last_hidden_state[0]
    assert distance([many_of(whole, SIZE)], [nn.functional.normalize(hidden, dim=-1)]) < 1e-4
    assert distance([many_of(raw, SIZE)], [hidden]) < 1e-4


def test_an_output_that_the_model_has_not_is_refused_in_a_sentence() -> None:
    with pytest.raises(InvalidRequest, match=r"makes no sparse vectors, according to its files; it makes vectors of w"):
        check_output("embed_sparse", EmbeddingFacts(size=4))


class _Runs:
    def __reduce__(self) -> Any:
        return print, ("run",)


@pytest.mark.parametrize(
    "state",
    [
        {"weight": _Runs(), "bias": torch.zeros(1)},
        {"weight": torch.zeros(SIZE, 1).t(), "bias": torch.zeros(1)[:0]},
        {"weight": torch.zeros(1, SIZE).int(), "bias": torch.zeros(1)},
        {"weight": torch.zeros(1, SIZE + 1), "bias": torch.zeros(1)},
        [torch.zeros(1, SIZE)],
        nn.Linear(SIZE, 1),
    ],
)
def test_heads_in_other_pickles_are_refused_and_not_run(
    tmp_path: Path, state: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    write_m3(tmp_path)
    torch.save(state, tmp_path / "sparse_linear.pt")
    with pytest.raises(ModelError, match=r"sparse_linear\.pt"):
        make_core(tmp_path)
    assert "run" not in capsys.readouterr().out


def test_token_ids_keep_all_tokens_and_texts_are_cut_to_the_smaller_limit(tmp_path: Path) -> None:
    write_colbert("bert", tmp_path, "pylate", attends=True)
    core = make_core(tmp_path, max_num_batched_tokens=400, max_num_seqs=8)
    facts, tokenizer = facts_of(core), Tokenizer(tmp_path)
    model: Any = SimpleNamespace(tokenizer=tokenizer)
    job: Any = SimpleNamespace(facts=core.executor.facts)
    encoding, begin, params = facts.encodings["document"], facts.instructions["document"], PoolingParams()
    ids = tokenizer.encode("the fox!", 512)
    prompt = encode_tokens(model, job, ids, "input", encoding, begin, params, None)
    assert prompt.token_ids == ids
    assert not PoolingParams.read(prompt.payload).drops_skiplist
    for limit, side in ((5, "right"), (400, "left")):
        cut = encode_tokens(model, job, "a day. " * 99, "input", encoding, begin, params, Truncation(limit, side))
        assert len(cut.token_ids) == min(limit, DOCUMENT_TOKENS)
    with pytest.raises(InvalidRequest, match="maximum context length is"):
        encode_tokens(model, job, ids * 200, "input", encoding, begin, params, None)
    cut = encode_tokens(model, job, ids * 200, "input", encoding, begin, params, Truncation(7, "right"))
    assert cut.token_ids == (ids * 2)[:7]


def test_a_sparse_vector_with_too_many_numbers_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_splade("bert", tmp_path)
    rows = [splade(model, prompt) for prompt in PROMPTS]
    most = int((rows[1] != 0).sum())
    assert most < max(int((row != 0).sum()) for row in rows)
    for module in (heads, pooling):
        monkeypatch.setattr(module, "SPARSE_NUMBERS_MAX", most)
    core = make_core(tmp_path, max_num_batched_tokens=400, max_num_seqs=8)
    for payload, row in zip(compute(core, [(each, SPARSE) for each in PROMPTS]), rows, strict=True):
        if int((row != 0).sum()) > most:
            assert payload == TOO_DENSE
        else:
            assert distance([sparse_of(payload, len(row))], [row]) < 1e-4


@pytest.mark.parametrize("named", [True, False])
def test_the_largest_step_has_all_sparse_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool) -> None:
    """A model that is sparse by its class alone does not become another one."""
    write_splade("bert", tmp_path, named=named)
    monkeypatch.setattr(machine, "free_memory_bytes", lambda _: 80 << 20)
    make_core(tmp_path, max_num_batched_tokens=8192, max_num_seqs=8)
    with pytest.raises(ModelError, match=r"lower .*max_num_seqs"):  # 16 bytes for each of 384 tokens
        make_core(tmp_path, max_num_batched_tokens=8192, max_num_seqs=8192)


def test_numbers_that_are_not_finite_are_no_fault_of_the_client() -> None:
    count = SPARSE_NUMBERS_MAX + 1
    weights = np.full(count, np.nan, np.float32).view(np.int32)
    assert encode_splade(np.concatenate((np.arange(count, dtype=np.int32), weights))) == b""


def test_a_masked_model_without_its_head_still_embeds(tmp_path: Path) -> None:
    write_served_encoder("bert", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["BertForMaskedLM"]}))
    assert facts_of(make_core(tmp_path, max_num_batched_tokens=400)).outputs == ("embed", "token_embed", "embed_all")


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("modules.json", [{"type": "a.Transformer", "path": ""}, {"type": "a.Dense", "path": "1_Dense"}, 7], "object"),
        ("sentence_bert_config.json", {"query_expansion": [1]}, "query_expansion"),
        ("sentence_bert_config.json", {"query_expansion": {"length": 60_000}}, "more than the context"),
    ],
)  # fmt: skip
def test_files_of_other_shapes_are_refused_by_name(tmp_path: Path, file: str, content: Any, named: str) -> None:
    write_colbert("bert", tmp_path, "native", attends=True)
    old = json.loads((tmp_path / file).read_text()) if (tmp_path / file).exists() else {}
    (tmp_path / file).write_text(json.dumps(old | content if isinstance(content, dict) else content))
    with pytest.raises(ModelError, match=named):
        make_core(tmp_path)
