"""Compares decoder layers of the compiled kernels: two calls with the definition in float64, one call with the two."""

from dataclasses import dataclass

import pytest
import torch
from tests.engine.execution.native.checks import DTYPES, RUNS, TOLERANCE, assert_close, random
from torch.nn import functional

from conveyor_engine.execution import native

pytestmark = RUNS

HIDDEN, HEADS, KV_HEADS, DIM, SIZE = 40, 4, 2, 24, 64  # AMX multiplies 96 and 64 with tiles, but not 40
SHAPES = {"qkv": (192, HIDDEN), "out": (HIDDEN, 96), "gate_up": (2 * SIZE, HIDDEN), "down": (HIDDEN, SIZE)}
KINDS = pytest.mark.parametrize(("rotary", "with_norms", "with_biases"), [(24, True, False), (10, False, True)])


@dataclass(frozen=True)
class Plain:
    """The weights of a layer in the form of the definition."""

    weights: dict[str, torch.Tensor]
    biases: dict[str, torch.Tensor | None]
    before_attention: native.Norm
    before_mlp: native.Norm
    heads: tuple[native.Norm, native.Norm] | None

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        bias = self.biases[name]
        return functional.linear(x, self.weights[name].double(), None if bias is None else bias.double())

    def layer(
        self, window: int | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None
    ) -> native.Layer:
        products = {n: native.Product(native.pack_linear(w), self.biases[n]) for n, w in self.weights.items()}
        parts = native.LayerParts(
            before_attention=self.before_attention, before_mlp=self.before_mlp, heads=self.heads, **products
        )
        return native.Layer(parts, native.Heads(HEADS, KV_HEADS, DIM, 0.3, window, softcap, sinks))


def make_plain(dtype: torch.dtype, with_norms: bool, with_biases: bool) -> Plain:
    weights = {name: random(*shape, dtype=dtype, seed=n) / 6 for n, (name, shape) in enumerate(SHAPES.items())}
    biases = {name: random(w.shape[0], dtype=dtype) if with_biases else None for name, w in weights.items()}
    first, second, *both = (native.Norm(random(n, dtype=dtype, seed=n), 1e-5, 1.0) for n in (HIDDEN, HIDDEN, DIM, DIM))
    return Plain(weights, biases, first, second, (both[0], both[1]) if with_norms else None)


def norm(x: torch.Tensor, by: native.Norm) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + by.eps).rsqrt() * (by.weight.double() + by.offset)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x (T, heads, D) by cos, sin (1, T, R)."""
    part, rest = x.split([cos.shape[2], x.shape[2] - cos.shape[2]], dim=-1)
    first, second = part.chunk(2, dim=-1)
    turned = part * cos[0, :, None].double() + torch.cat([-second, first], -1) * sin[0, :, None].double()
    return torch.cat([turned, rest], -1)


@DTYPES
@KINDS
@pytest.mark.parametrize("tokens", [1, 37])
def test_a_layer_in_two_calls_equals_its_definition(
    dtype: torch.dtype, tokens: int, rotary: int, with_norms: bool, with_biases: bool
) -> None:
    plain = make_plain(dtype, with_norms, with_biases)
    layer = plain.layer()
    x, attended = random(1, tokens, HIDDEN, dtype=dtype), random(tokens, HEADS, DIM, dtype=dtype)
    cos, sin = (random(1, tokens, rotary, dtype=dtype, seed=n) for n in (5, 6))
    qkv = plain.linear("qkv", norm(x[0].double(), plain.before_attention)).view(tokens, -1, DIM)
    query, key, value = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    if plain.heads is not None:
        query, key = norm(query, plain.heads[0]), norm(key, plain.heads[1])
    expected = torch.cat([rotate(query, cos, sin), rotate(key, cos, sin), value], dim=1)
    assert_close(layer.before_attention(x, cos, sin), expected, tolerance=3 * TOLERANCE[dtype])

    added = x[0].double() + plain.linear("out", attended.double().flatten(1))
    gate, up = plain.linear("gate_up", norm(added, plain.before_mlp)).chunk(2, dim=-1)
    before = x.clone()
    actual = layer.after_attention(x, attended)[0]
    assert_close(actual, added + plain.linear("down", functional.silu(gate) * up), tolerance=3 * TOLERANCE[dtype])
    assert torch.equal(x, before)


class Cached:
    """The second step of two sequences with interleaved blocks: a decode, a chunk, and padding."""

    def __init__(self, dtype: torch.dtype, rotary: int) -> None:
        self.tables = torch.tensor([[3, 1, 0], [2, 4, 5]], dtype=torch.int32)
        self.starts = torch.tensor([0, 1, 20], dtype=torch.int32)
        self.totals = torch.tensor([21, 40], dtype=torch.int32)
        positions = torch.tensor([20, *range(21, 40)])
        tables = self.tables.long()[[0, *[1] * 19]]
        slots = tables.gather(1, (positions // 16)[:, None])[:, 0] * 16 + positions % 16
        self.slots = torch.cat([slots, torch.tensor([-1, -1])])
        self.x = random(1, 22, HIDDEN, dtype=dtype)
        self.rotation = [random(1, 22, rotary, dtype=dtype, seed=n) for n in (5, 6)]
        self.caches = native.kv_cache(6, KV_HEADS, DIM, DIM, dtype)
        for seed, cache in enumerate(self.caches):
            cache.copy_(random(*cache.shape, dtype=dtype, seed=seed))

    def run(self, layer: native.Layer) -> torch.Tensor:
        step = native.CacheStep(self.starts, self.totals, [(self.slots, self.tables)])
        return native.Layers([layer], [self.caches], [0]).forward(self.x, self.rotation[0], self.rotation[1], step, 1)

    def run_in_two(
        self, layer: native.Layer, window: int | None, softcap: float | None, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        qkv = layer.before_attention(self.x, self.rotation[0], self.rotation[1])
        query, key, value = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        native.kv_write(key, value, self.slots, self.caches)
        attended = native.paged_attention(
            query, self.caches, self.starts, self.totals, self.tables,
            value_dim=DIM, scaling=0.3, sliding_window=window, softcap=softcap,
            sinks=sinks,
        )  # fmt: skip
        return layer.after_attention(self.x, attended)


@DTYPES
@KINDS
@pytest.mark.parametrize(
    ("window", "softcap", "has_sinks"), [(None, None, False), (7, None, False), (None, 2.0, False), (7, None, True)]
)
def test_a_layer_in_one_call_is_the_same_to_the_bit(
    dtype: torch.dtype,
    rotary: int,
    with_norms: bool,
    with_biases: bool,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
) -> None:
    sinks = random(HEADS, dtype=dtype) if has_sinks else None
    layer = make_plain(dtype, with_norms, with_biases).layer(window, softcap, sinks)
    one, two = Cached(dtype, rotary), Cached(dtype, rotary)
    for _ in range(2):  # the second time in memory that has been used
        assert torch.equal(one.run(layer), two.run_in_two(layer, window, softcap, sinks))
    assert all(torch.equal(*both) for both in zip(one.caches, two.caches, strict=True))
    assert not torch.equal(one.caches[0], Cached(dtype, rotary).caches[0]), "something was written"


@DTYPES
@pytest.mark.parametrize("count", [1, 2, 3])
def test_layers_in_one_call_are_the_same_as_one_after_another(dtype: torch.dtype, count: int) -> None:
    layers = [make_plain(dtype, True, False).layer(window) for window in (None, 7, None)]
    together, apart = ([Cached(dtype, 24) for _ in layers] for _ in range(2))
    first = together[0]
    step = native.CacheStep(first.starts, first.totals, [(first.slots, first.tables)])
    expected = first.x
    for layer, cached in zip(layers[:count], apart, strict=False):
        cached.x = expected
        expected = cached.run(layer)
    joined = native.Layers(layers, [cached.caches for cached in together], [0] * len(layers))
    before = first.x.clone()
    assert torch.equal(joined.forward(first.x, *first.rotation, step, count), expected)
    assert torch.equal(first.x, before)
    for one, other in zip(together, apart, strict=True):
        assert all(torch.equal(*both) for both in zip(one.caches, other.caches, strict=True))


def test_a_layer_reports_where_its_time_went() -> None:
    native.take_layer_seconds()
    Cached(torch.float32, 24).run(make_plain(torch.float32, True, False).layer())
    assert all(seconds > 0 for seconds in native.take_layer_seconds().values())
    assert not any(native.take_layer_seconds().values())
