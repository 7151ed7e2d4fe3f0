"""Models whose cache holds latents give the tokens of transformers' `generate` in every mode, with less memory.

tests/engine/test_kinds.py compares the same models in further ways.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.execution.native.checks import assert_close
from tests.engine.lora import answer, save_adapter
from tests.engine.references import SHARED_PREFIX, Reference, add, answers, run, tokens_of
from tests.engine.tiny_models import LATENT_KINDS

from conveyor_engine.execution import native
from conveyor_engine.execution.attention.backend import AttentionMetadata, AttentionSpec, LayerShape
from conveyor_engine.execution.attention.cpu_native import CpuNative
from conveyor_engine.execution.attention.interface import PagedStep
from conveyor_engine.execution.attention.torch_paged import TorchPaged
from conveyor_engine.execution.models import latent, latent_prompts
from conveyor_engine.execution.models.latent import Latent, _PagedLatent
from conveyor_engine.execution.models.latent_prompts import Expander, Sizes
from conveyor_engine.execution.models.trial import random
from conveyor_engine.loop.core import EngineCore

GetReference = Callable[[str], Reference]
FEW = ("deepseek_v3", "minicpm3")  # those with experts, and those without
KINDS = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in FEW else pytest.mark.slow) for kind in LATENT_KINDS]
)
BACKENDS = pytest.mark.parametrize("backend", ["torch", "auto"])


def widths(core: EngineCore) -> set[tuple[int, ...]]:
    """Return (KV heads, numbers of a token) of the caches of all layers."""
    backend: Any = core.executor.backend  # type: ignore[attr-defined]
    caches = [backend.caches(layer) for layer in range(3)]
    if isinstance(backend, CpuNative):
        return {(both[1].shape[1], both[1].shape[3] + both[0].shape[2] * both[0].shape[4]) for both in caches}
    return {(both[0].numbers.shape[1:]) for both in caches}


@BACKENDS
@pytest.mark.parametrize(
    "mode", ["static", "continuous", *(pytest.param(m, marks=pytest.mark.nightly) for m in ("none", "dynamic"))]
)
@KINDS
def test_every_mode_gives_the_tokens_of_generate(reference: GetReference, kind: str, mode: str, backend: str) -> None:
    ref = reference(kind)
    budget = 13 if mode == "continuous" else 512
    core = ref.make_core(batching_mode=mode, attention_backend=backend, max_num_batched_tokens=budget)
    assert answers(core, ref.prompts) == ref.answers
    has_native = backend == "auto" and native.why_missing() is None
    assert widths(core) == {(1, 32 if has_native else 24)}, "16 of the latent and 8 of the rotary key, of one head"


@BACKENDS
@KINDS
def test_preempted_requests_give_them_too(reference: GetReference, kind: str, backend: str) -> None:
    ref = reference(kind)
    core = ref.make_core(num_kv_blocks=8, attention_backend=backend)
    assert answers(core, ref.prompts) == ref.answers
    assert core.stats().num_preemptions > 0


@BACKENDS
@KINDS
def test_requests_that_share_a_prefix_give_them_too(reference: GetReference, kind: str, backend: str) -> None:
    ref = reference(kind)
    core = ref.make_core(max_num_batched_tokens=512, attention_backend=backend)
    assert answers(core, ref.prompts[4:]) == ref.answers[4:]
    assert core.stats().prefix_cache_hit_tokens == SHARED_PREFIX // 16 * 16


def test_a_block_has_the_bytes_of_latents_and_not_of_heads() -> None:
    torch_, compiled = TorchPaged(), CpuNative()
    shape = AttentionSpec(0, 1.0, None, None, values_are_keys=True)
    probe = latent_shape(shape, heads=128, rank=512, rotary=64)
    for backend in (torch_, compiled):
        # DeepSeek-V3: 68.6 KiB a token
        assert backend.block_bytes([probe] * 61, 16, torch.bfloat16) == 61 * 16 * 576 * 2


def latent_shape(spec: AttentionSpec, heads: int, rank: int, rotary: int) -> Any:
    from conveyor_engine.execution.attention.interface import Probe

    probe = Probe()
    key = torch.zeros(2, 1, rank + rotary)
    probe.attend(spec, torch.zeros(2, heads, rank + rotary), key, key[..., :rank])
    return probe.shapes[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_both_halves_of_the_weight_compute_what_the_whole_does(dtype: torch.dtype) -> None:
    expand = torch.nn.Linear(32, 4 * (16 + 12), bias=False, dtype=dtype).requires_grad_(False)
    halves = Latent(expand, 16, 8, 12)
    latents, query = random(5, 32, like=expand.weight), random(5, 4, 16 + 8, like=expand.weight)
    keys, values = expand(latents).view(5, 4, 28).double().split([16, 12], dim=2)
    absorbed = halves.absorb(query)
    scores = torch.einsum("thr,tr->th", absorbed[..., :32].double(), latents.double())
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(scores, (query[..., :16].double() * keys).sum(2), rtol=tolerance, atol=tolerance)
    assert torch.equal(absorbed[..., 32:], query[..., 16:])
    ours = halves.expand(latents[:, None].expand(5, 4, 32)).double()
    torch.testing.assert_close(ours, values, rtol=tolerance, atol=tolerance)


def test_a_layer_that_would_compute_something_else_keeps_all_heads(
    reference: GetReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref, absorb = reference("minicpm3"), Latent.absorb
    monkeypatch.setattr(Latent, "absorb", lambda self, query: absorb(self, query) * 2.0)
    core = ref.make_core()
    assert widths(core) == {(4, 24)}
    assert answers(core, ref.prompts) == ref.answers
    monkeypatch.setattr(latent, "same", lambda *_: True)
    assert answers(ref.make_core(), ref.prompts) != ref.answers, "the check was needed"


@BACKENDS
@pytest.mark.parametrize(("target", "heads"), [("all-linear", 4), (["kv_a_proj_with_mqa", "q_b_proj", "o_proj"], 1)])
def test_adapters_are_right_whether_they_change_the_expanding_layer_or_not(
    reference: GetReference, tmp_path: Path, backend: str, target: Any, heads: int
) -> None:
    ref = reference("minicpm3")
    expected = answer(save_adapter(ref.directory, tmp_path, 3, target_modules=target), ref.prompts)
    core = ref.make_core(adapters=(("a", str(tmp_path)),), attention_backend=backend)
    assert {kv_heads for kv_heads, _ in widths(core)} == {heads}
    for number, prompt in enumerate(ref.prompts):
        add(core, str(number), prompt, 1)
    outputs = run(core)
    assert [tokens_of(outputs[str(number)]) for number in range(len(ref.prompts))] == expected


def step_of(sequences: list[tuple[int, int]], tables: torch.Tensor) -> AttentionMetadata:
    """Return a step of sequences, each (queries, tokens in the cache)."""
    queries = [count for count, _ in sequences]
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    lengths = torch.tensor([length for _, length in sequences], dtype=torch.int32)
    slots = [
        tables[row, position // 16].long() * 16 + position % 16
        for row, (count, length) in enumerate(sequences)
        for position in range(length - count, length)
    ]
    return AttentionMetadata(
        *(starts, lengths, tables, torch.tensor(slots), len(sequences), queries.index(max(queries)), sum(queries)),
        *(starts.numpy(), lengths.numpy()),
    )


@pytest.mark.skipif(native.why_missing() is not None or native.isa() == "generic", reason="needs the compiled kernels")
@pytest.mark.parametrize("room", [2**26, 1], ids=["all heads together", "each head by itself"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_long_prompts_attend_over_expanded_latents(
    dtype: torch.dtype, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, nope, rotary, value_dim, heads = 64, 24, 8, 40, 3
    expand = torch.nn.Linear(rank, heads * (nope + value_dim), bias=False, dtype=dtype).requires_grad_(False)
    latent, backend = Latent(expand, nope, rotary, value_dim), CpuNative()
    backend.allocate(
        [LayerShape(heads, 1, rank + rotary, rank, values_are_keys=True)], 20, 16, dtype, torch.device("cpu")
    )
    backend.caches(0)[1].fill_(torch.nan)  # what no token has written
    sequences = [(1, 30), (5, 5), (70, 75), (90, 90), (2, 9)]
    tables = torch.randperm(20, generator=torch.Generator().manual_seed(1)).int()
    tables = torch.stack([tables[first : first + 6] for first in (0, 2, 3, 8, 14)])
    monkeypatch.setattr(latent_prompts, "_ROOM_BYTES", room)
    monkeypatch.setattr(latent_prompts, "_PIECE", 32)
    counted: list[int] = []
    attend = Expander.attend

    def count(self: Expander, spec: AttentionSpec, query: torch.Tensor, *others: Any) -> torch.Tensor:
        counted.append(len(query))
        return attend(self, spec, query, *others)

    monkeypatch.setattr(Expander, "attend", count)
    keys = random(sum(length for _, length in sequences), 1, rank + rotary, like=expand.weight, seed=2)
    before = step_of([(length, length) for _, length in sequences], tables)
    backend.write_kv(0, keys, keys[..., :rank], before)
    step = step_of(sequences, tables)
    query = random(step.num_tokens, heads, nope + rotary, like=expand.weight)
    written = torch.cat(
        [
            part[length - queries :]
            for part, (queries, length) in zip(keys.split([n for _, n in sequences]), sequences, strict=True)
        ]
    )
    spec = AttentionSpec(0, 0.2, None, None)
    out = _PagedLatent(PagedStep(backend, step), latent).attend(spec, query, written, written[..., :rank])
    assert counted == [70, 90]
    for number, (queries, length) in enumerate(sequences):
        first = int(step.query_start_loc[number])
        of_row = keys.split([n for _, n in sequences])[number][:, 0].double()
        expanded = (of_row[:, :rank] @ expand.weight.double().t()).view(length, heads, -1)
        key = torch.cat((expanded[..., :nope], of_row[:, None, rank:].expand(-1, heads, -1)), dim=2)
        scores = torch.einsum("qhd,khd->hqk", query[first : first + queries].double(), key) * spec.scaling
        hidden = torch.arange(length)[None] > torch.arange(length - queries, length)[:, None]
        exact = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), expanded[..., nope:])
        assert_close(out[first : first + queries], exact, 3e-6 if dtype == torch.float32 else 2e-2)


@pytest.mark.skipif(native.why_missing() is not None or native.isa() == "generic", reason="needs the compiled kernels")
@KINDS
def test_prompts_over_expanded_latents_give_the_tokens_of_generate(
    reference: GetReference, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latent_prompts, "FEWEST", 2)
    monkeypatch.setattr(Sizes, "is_less_work", lambda *_: True)
    ref = reference(kind)
    for budget in (13, 512):
        core = ref.make_core(max_num_batched_tokens=budget)
        assert answers(core, ref.prompts) == ref.answers


def test_expanding_is_less_work_for_a_whole_prompt_and_for_long_parts_of_one() -> None:
    sizes = Sizes(rank=512, nope=128, rotary=64, value=128)  # DeepSeek's
    assert sizes.is_less_work(64, 64)
    assert sizes.is_less_work(256, 100_000)
    assert not sizes.is_less_work(128, 100_000)
    assert not sizes.is_less_work(1, 4096)
