"""Tests the engine's layers for CUDA, on a GPU or otherwise in Triton's interpreter.

Kernels are compared with their definitions, and whole models with transformers' own layers.
"""

from collections.abc import Callable

import pytest
import torch
from tests.engine.execution.interpreter import DEVICE, DTYPES, ON_DEVICE, assert_close, random
from tests.engine.execution.models.families import logits_of, make_model, relative_error
from tests.engine.references import Reference, add, run, tokens_of
from torch import nn
from torch.nn import functional

from conveyor_engine.execution.attention.triton_backend import TritonPaged
from conveyor_engine.execution.kernels import elementwise
from conveyor_engine.execution.kernels.few_rows import Norm, multiply_rows
from conveyor_engine.execution.kernels.heads import HeadNorms, prepare_heads
from conveyor_engine.execution.kernels.slot_cache import SlotCache
from conveyor_engine.execution.models.elementwise import TorchElementwise, TritonElementwise, choose_elementwise
from conveyor_engine.execution.models.fuse import fuse_model
from conveyor_engine.execution.models.triton_layers import TritonAttention, TritonDecoderLayer, _add_product
from conveyor_engine.tasks.generate.execution import runner

# From the sigmoid of a large negative number, which is correctly 0.
pytestmark = [pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"), *ON_DEVICE]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    x = x.double()
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * (offset + weight.double())


@DTYPES
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_norm_adds_the_residual_first(dtype: torch.dtype, offset: float) -> None:
    torch.manual_seed(0)
    x, residual, weight = random(1, 5, 48, dtype=dtype), random(1, 5, 48, dtype=dtype), random(48, dtype=dtype)
    added, normed = elementwise.add_rms_norm(residual, x, weight, 0.1, offset)
    assert torch.equal(added, residual + x)
    assert_close(normed, rms_norm(added, weight, 0.1, offset))
    assert_close(elementwise.rms_norm(x, weight, 0.1, offset), rms_norm(x, weight, 0.1, offset))


@DTYPES
@pytest.mark.parametrize("size", [34, 1500])
def test_silu_mul_is_its_definition(dtype: torch.dtype, size: int) -> None:
    x = random(1, 3, 2 * size, dtype=dtype)
    gate, up = x.double().chunk(2, dim=-1)
    assert_close(elementwise.silu_mul(x), gate * gate.sigmoid() * up)


@DTYPES
@pytest.mark.parametrize("offset", [None, 0.0, 1.0], ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "dim", "rotary"), [(4, 2, 16, 16), (7, 1, 20, 8)])
def test_heads_are_normed_rotated_and_written(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, dim: int, rotary: int, offset: float | None
) -> None:
    torch.manual_seed(0)
    qkv = random(3, num_heads + 2 * num_kv_heads, dim, dtype=dtype)
    cos, sin = random(1, 3, rotary, dtype=dtype), random(1, 3, rotary, dtype=dtype)
    norms = None if offset is None else HeadNorms(random(dim, dtype=dtype), random(dim, dtype=dtype), 0.1, offset)
    caches = (
        SlotCache.allocate(6, num_kv_heads, dim, dtype, DEVICE),
        SlotCache.allocate(6, num_kv_heads, dim, dtype, DEVICE),
    )
    query = prepare_heads(qkv, (cos, sin), norms, caches, torch.tensor([4, -1, 0], device=DEVICE))

    exact = list(qkv.double().split([num_heads, num_kv_heads, num_kv_heads], dim=1))
    for index, weight in enumerate((norms.query, norms.key) if norms else ()):
        exact[index] = rms_norm(exact[index], weight, 0.1, norms.offset)
    turned = [TorchElementwise().rope(x, cos.double(), sin.double()) for x in exact[:2]]
    assert_close(query, turned[0])
    for cache, source in zip(caches, (turned[1], exact[2]), strict=True):
        assert_close(cache.numbers[[4, 0]], source[[0, 2]])
        assert not cache.numbers[[1, 2, 3, 5]].any()


@DTYPES
@pytest.mark.parametrize(
    ("rows", "size", "columns"), [(1, 10, 40), (1, 6, 2500), (2, 6, 2500), (3, 10, 40), (4, 6, 600)]
)
@pytest.mark.parametrize("offset", [None, 0.0, 1.0], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_are_normed_and_multiplied(
    dtype: torch.dtype, rows: int, size: int, columns: int, offset: float | None, bias: bool
) -> None:
    torch.manual_seed(0)
    x, weight, residual = (random(*shape, dtype=dtype) for shape in ((rows, columns), (size, columns), (rows, size)))
    norm = None if offset is None else Norm(random(columns, dtype=dtype), 0.1, offset)
    added = random(size, dtype=dtype) if bias else None
    normed = x.double() if norm is None else rms_norm(x, norm.weight, 0.1, norm.offset).to(dtype).double()
    exact = functional.linear(normed, weight.double(), None if added is None else added.double())
    assert_close(multiply_rows(x, weight, added, norm=norm), exact)
    assert_close(multiply_rows(x, weight, added, norm=norm, residual=residual), exact + residual.double())
    gate, up = exact.chunk(2, dim=-1)
    assert_close(multiply_rows(x, weight, added, norm=norm, gated=True), gate * gate.sigmoid() * up)


@pytest.mark.slow
@pytest.mark.usefixtures("triton_runs_here")
@pytest.mark.parametrize("family", ["Qwen2", "Gemma2"])
def test_a_layer_gives_few_rows_what_it_gives_them_among_others(family: str) -> None:
    model = make_model(family).to(DEVICE)
    fuse_model(model)
    layer = model.model.layers[1]
    assert layer._multiplies_rows
    torch.manual_seed(0)
    rows = 6  # more than our own products multiply
    hidden = torch.randn(1, rows, model.config.hidden_size, device=DEVICE)
    rotation = model.model.rotary_emb(hidden, torch.arange(rows, device=DEVICE)[None])

    class OwnValues:
        """Attention of each token to itself only."""

        runs_bidirectional = False

        def attend(self, spec: object, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)

    with torch.inference_mode():
        together = layer(hidden.clone(), rotation, OwnValues())
        for some in (slice(0, 1), slice(1, 3), slice(2, 5), slice(2, 6)):
            of_few = layer(hidden[:, some].clone(), tuple(x[:, some] for x in rotation), OwnValues())
            assert_close(of_few, together[:, some].double())


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_added_to_the_residual(bias: bool) -> None:
    linear, residual, x = nn.Linear(6, 4, bias=bias), torch.randn(1, 3, 4), torch.randn(1, 3, 6)
    with torch.inference_mode():
        expected = residual + linear(x)
        torch.testing.assert_close(_add_product(residual.clone(), linear, x), expected)


@pytest.mark.slow
@pytest.mark.usefixtures("triton_runs_here")
@pytest.mark.parametrize(
    "family", ["Qwen3", "Gemma2", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("Llama", "Phi3"))]
)
def test_a_model_on_these_layers_gives_the_logits_of_transformers(family: str) -> None:
    model = make_model(family).to(DEVICE)
    expected = logits_of(model)
    assert fuse_model(model)["layers"] == 2
    assert all(type(layer) is TritonDecoderLayer for layer in model.model.layers)
    assert all(type(layer.self_attn) is TritonAttention for layer in model.model.layers)
    assert relative_error(logits_of(model), expected) < 1e-5


@pytest.mark.nightly
@pytest.mark.usefixtures("triton_runs_here")
def test_an_engine_on_these_layers_and_caches_gives_the_tokens_of_generate(
    reference: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = reference("qwen3")
    monkeypatch.setattr(runner, "select_backend", lambda *_: TritonPaged(num_processors=16))
    core = ref.make_core(attention_backend="auto", device=DEVICE.type)
    for number in (0, 1):
        add(core, str(number), ref.prompts[number], max_tokens=5)
    outputs = run(core)
    assert [tokens_of(outputs[str(number)]) for number in (0, 1)] == [ref.answers[number][:5] for number in (0, 1)]


def test_they_are_for_cuda() -> None:
    assert type(choose_elementwise(torch.device("cuda"), torch.bfloat16)) is TritonElementwise
    assert not isinstance(choose_elementwise(torch.device("cpu"), torch.float16), TritonElementwise)
