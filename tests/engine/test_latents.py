"""Models whose cache holds latents give the tokens of transformers' `generate` in every mode, with less memory.

tests/engine/test_kinds.py compares the same models in further ways.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.lora import answer, save_adapter
from tests.engine.references import SHARED_PREFIX, Reference, add, answers, run, tokens_of
from tests.engine.tiny_models import LATENT_KINDS

from conveyor_engine.execution import native
from conveyor_engine.execution.attention.backend import AttentionSpec
from conveyor_engine.execution.attention.cpu_native import CpuNative
from conveyor_engine.execution.attention.torch_paged import TorchPaged
from conveyor_engine.execution.models import latent
from conveyor_engine.execution.models.latent import Latent
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
@pytest.mark.parametrize("mode", ["none", "static", "dynamic", "continuous"])
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
    halves = Latent(expand, 16, 12)
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
