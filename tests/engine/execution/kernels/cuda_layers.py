"""Decoder layers with the shapes of real models on CUDA tensors without numbers, steps for them, and sampling.

Kernels are launched here as on a GPU; the caller decides what a launch does. Call this in a FakeTensorMode.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from conveyor_engine.execution.attention.backend import AttentionMetadata, AttentionSpec, Ends, LayerShape
from conveyor_engine.execution.attention.interface import PagedStep
from conveyor_engine.execution.attention.triton_backend import TritonPaged
from conveyor_engine.execution.kernels.cut import cut
from conveyor_engine.execution.kernels.sample import sample
from conveyor_engine.execution.kernels.uniform import uniform_numbers
from conveyor_engine.execution.kernels.weights import Kind, Weights, is_half
from conveyor_engine.execution.models.elementwise import choose_elementwise
from conveyor_engine.execution.models.gpu_experts import Clamps, GpuExperts
from conveyor_engine.execution.models.gpu_linear import GpuLinear
from conveyor_engine.execution.models.layers import DecoderLayer, GatedMlp, LayerNorms, RmsNorm
from conveyor_engine.execution.models.linear import build_linear
from conveyor_engine.execution.models.recognise import attention_class, layer_class

CUDA = torch.device("cuda")
BLOCK_SIZE, NUM_BLOCKS = 16, 1024
MULTIPROCESSORS = 132


@dataclass(frozen=True)
class Shape:
    """The shape of one layer."""

    hidden: int
    intermediate: int
    heads: LayerShape
    has_head_norms: bool = False
    sandwich: bool = False  # also has norms after attention and MLP, like Gemma
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    def sinks(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor | None:
        return torch.empty(self.heads.num_heads, dtype=dtype, device="cuda") if self.has_sinks else None


SHAPES = {
    "Llama-3.2-1B": Shape(2048, 8192, LayerShape(32, 8, 64, 64)),
    "Qwen3-8B": Shape(4096, 12288, LayerShape(32, 8, 128, 128), has_head_norms=True),
    "Gemma-2-2B": Shape(2304, 9216, LayerShape(8, 4, 256, 256), sandwich=True, window=4096, softcap=50.0),
    "gpt-oss-20b": Shape(2880, 2880, LayerShape(64, 8, 64, 64), window=128, has_sinks=True),
}


# Latent attention, whose projections keep transformers' code: only attention is ours.
LATENTS = {
    "DeepSeek-V3": Shape(7168, 18432, LayerShape(128, 1, 576, 512, values_are_keys=True)),
    "GLM-4.7-Flash": Shape(2048, 10240, LayerShape(20, 1, 576, 512, values_are_keys=True)),
    "MiniCPM3": Shape(2560, 6400, LayerShape(40, 1, 288, 256, values_are_keys=True)),
}


@dataclass(frozen=True)
class Step:
    """The rows of a batch, (query tokens, context) each, decodes first."""

    rows: tuple[tuple[int, int], ...]
    sees_ahead: bool = False  # whether tokens see later ones, as those of images


STEPS = {
    "decodes": Step(((1, 200),) * 64),
    "one long decode": Step(((1, 30_000),)),
    "four decodes": Step(((1, 200),) * 4),
    "a chunk of a prompt": Step(((500, 900),)),
}


WITH_IMAGES = Step(((500, 900),), sees_ahead=True)  # only for layers that are not ours


@dataclass(frozen=True)
class Packed:
    """A format of weights in few bits. group: 0 for one scale of a row. inputs_of_factor: 0 for one factor of a row."""

    kind: Kind
    group: int = 0
    scales: torch.dtype = torch.bfloat16
    starts: torch.dtype | None = None
    inputs_of_factor: int | None = None
    has_bias: bool = False


PACKED = {
    "int4": Packed("int4", 32, has_bias=True),
    "int4 with zeros": Packed("int4", 128, starts=torch.uint8),
    "int8": Packed("int8"),
    "fp8": Packed("fp8", 128),
    "nvfp4": Packed("fp4", 16, torch.uint8, inputs_of_factor=0),
    "mxfp4": Packed("fp4", 32, has_bias=True),
    "q4_k": Packed("int4", 32, torch.int8, torch.int8, 256),
    "q6_k": Packed("int8", 16, torch.int8, None, 256),
}


def make_packed(packed: Packed, columns: int, size: int, dtype: torch.dtype = torch.bfloat16) -> GpuLinear:
    empty = partial(torch.empty, device=CUDA)
    width, groups = columns // 2 if is_half(packed.kind) else columns, columns // (packed.group or columns)
    numbers = empty((size, width), dtype=torch.int8 if packed.kind == "int8" else torch.uint8)
    scales = empty((groups, size), dtype=packed.scales)
    starts = None if packed.starts is None else empty((groups, size), dtype=packed.starts)
    factors = None
    if packed.inputs_of_factor is not None:
        count = columns // packed.inputs_of_factor if packed.inputs_of_factor else 1
        of_factors = torch.float16 if packed.inputs_of_factor else torch.float32
        factors = empty((count, 1 if starts is None else 2, size), dtype=of_factors)
    bias = empty(size, dtype=dtype) if packed.has_bias else None
    return GpuLinear(Weights(packed.kind, numbers, scales, starts, factors), bias, dtype)


def make_experts(packed: Packed, dtype: torch.dtype = torch.bfloat16) -> GpuExperts:
    """Make the experts of a layer of Qwen3.6-35B-A3B; with biases in FP4, the formula is that of gpt-oss."""
    gate_up, down = (make_packed(packed, *shape, dtype) for shape in ((2048, 256 * 1024), (512, 256 * 2048)))
    biases = [each.bias.data for each in (gate_up, down) if each.bias is not None]
    clamps = Clamps(1.702, 7.0) if biases and packed.kind == "fp4" else None
    return GpuExperts(gate_up.packed, down.packed, 256, dtype, biases or None, clamps)


def prepare_experts(packed: Packed, tokens: int) -> Callable[[], object]:
    """Return the call of experts, of which each token has eight."""
    x = torch.empty((tokens, 2048), dtype=torch.bfloat16, device=CUDA)
    chosen = torch.empty((tokens, 8), dtype=torch.int64, device=CUDA)
    return partial(make_experts(packed), x, chosen, torch.empty((tokens, 8), dtype=torch.bfloat16, device=CUDA))


def prepare_product(packed: Packed, rows: int) -> Callable[[], object]:
    """Return the call of a product of so many rows, whose inputs it has to divide into parts."""
    linear = make_packed(packed, 8192, 2048)
    return partial(linear, torch.empty((rows, 8192), dtype=torch.bfloat16, device=CUDA))


def make_layer(shape: Shape, dtype: torch.dtype = torch.bfloat16, packed: Packed | None = None) -> DecoderLayer:
    """Make a layer as `recognise` makes it from a model's own layer."""
    heads, elementwise = shape.heads, choose_elementwise(CUDA, dtype)
    linear: Callable[[int, int], nn.Linear | GpuLinear]
    if packed is None:
        linear = partial(nn.Linear, bias=False, device=CUDA, dtype=dtype)
    else:
        linear = partial(make_packed, packed, dtype=dtype)

    def norm(size: int) -> RmsNorm:
        return RmsNorm(torch.empty(size, device=CUDA, dtype=dtype), 1e-6, float(shape.sandwich))

    q_size, kv_size = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    norms = LayerNorms(norm(shape.hidden), norm(shape.hidden), (norm(shape.hidden),) * 2 if shape.sandwich else None)
    head_norms = (norm(heads.head_dim), norm(heads.head_dim)) if shape.has_head_norms else None
    attention = attention_class(CUDA, head_norms or ())(
        AttentionSpec(0, heads.head_dim**-0.5, shape.window, shape.softcap, sinks=shape.sinks()),
        heads,
        (build_linear([linear(shape.hidden, q_size + 2 * kv_size)]), build_linear([linear(q_size, shape.hidden)])),
        head_norms,
        elementwise.rope,
    )
    mlp = GatedMlp(
        build_linear([linear(shape.hidden, 2 * shape.intermediate)]),
        build_linear([linear(shape.intermediate, shape.hidden)]),
        _gelu_mul if shape.sandwich else elementwise.silu_mul,
    )
    return layer_class(CUDA, norms)(norms, attention, mlp)


def _gelu_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def make_paged(
    shape: Shape, step: Step, dtype: torch.dtype = torch.bfloat16, kv_dtype: torch.dtype | None = None
) -> PagedStep:
    """Build the step's batch on a cache with one layer."""
    backend = TritonPaged(MULTIPROCESSORS, kv_dtype)
    backend.allocate([shape.heads], NUM_BLOCKS, BLOCK_SIZE, dtype, CUDA)
    queries, totals = (np.array(column, dtype=np.int32) for column in zip(*step.rows, strict=True))
    starts = np.concatenate([[0], queries.cumsum()]).astype(np.int32)
    width = -(-int(totals.max()) // BLOCK_SIZE)
    metadata = AttentionMetadata(
        query_start_loc=torch.empty(len(starts), dtype=torch.int32, device=CUDA),
        seq_lens=torch.empty(len(totals), dtype=torch.int32, device=CUDA),
        block_tables=torch.empty((len(totals), width), dtype=torch.int32, device=CUDA),
        slot_mapping=torch.empty(int(starts[-1]), dtype=torch.int64, device=CUDA),
        num_seqs=len(totals),
        num_decodes=int((queries == 1).sum()),
        num_tokens=int(starts[-1]),
        query_start_loc_host=starts,
        seq_lens_host=totals,
        ends=Ends(torch.empty(int(starts[-1]), dtype=torch.int32, device=CUDA), True) if step.sees_ahead else None,
    )
    return PagedStep(backend, metadata)


def prepare_attention(
    shape: Shape, step: Step, dtype: torch.dtype = torch.bfloat16, kv_dtype: torch.dtype | None = None
) -> Callable[[], object]:
    """Return the attention call of a layer that is not ours."""
    paged, heads = make_paged(shape, step, dtype, kv_dtype), shape.heads
    qkv = torch.empty(
        (paged.metadata.num_tokens, heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim), dtype=dtype, device=CUDA
    )
    query, key, value = qkv.split([heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], dim=1)
    spec = AttentionSpec(
        *(0, 1.0, shape.window, shape.softcap), sinks=shape.sinks(dtype), values_are_keys=heads.values_are_keys
    )
    return partial(paged.attend, spec, query, key, key[..., : heads.value_dim] if heads.values_are_keys else value)


def prepare(
    shape: Shape,
    step: Step,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    packed: Packed | None = None,
) -> Callable[[], object]:
    """Return the call of a layer, with all of a step's data prepared."""
    layer, paged = make_layer(shape, dtype, packed), make_paged(shape, step, dtype, kv_dtype)
    tokens = paged.metadata.num_tokens
    rotation = torch.empty((2, 1, tokens, shape.heads.head_dim), dtype=dtype, device=CUDA).unbind()
    hidden_states = torch.empty((1, tokens, shape.hidden), dtype=dtype, device=CUDA)
    return partial(layer, hidden_states, rotation, paged)


def prepare_sampling(rows: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[], object]:
    """Return a call that draws from logits with Qwen3's vocabulary."""
    logits = torch.empty((rows, 151_936), dtype=dtype, device=CUDA)
    draws, uniforms = torch.empty((rows, 2), device=CUDA), torch.empty((rows, 1), device=CUDA)
    return partial(sample, logits, draws, uniforms, 1e-5, 1 - 1e-6)


def prepare_uniforms(rows: int) -> Callable[[], object]:
    """Return a call that computes the uniform numbers of the rows."""
    seeds, entries = (
        torch.empty((rows, 1), dtype=torch.int64, device=CUDA),
        torch.empty(rows, dtype=torch.int64, device=CUDA),
    )
    return partial(uniform_numbers, seeds, entries, entries)


def prepare_cuts(rows: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[], object]:
    """Return a call that draws from the tokens that the cuts keep of such logits."""
    logits = torch.empty((rows, 151_936), dtype=dtype, device=CUDA)
    draws, uniforms = torch.empty((rows, 4), device=CUDA), torch.empty((rows, 1), device=CUDA)
    best, tokens = torch.empty(rows, device=CUDA), torch.empty(rows, dtype=torch.int64, device=CUDA)
    return partial(cut, logits, draws, uniforms, best, tokens, 1e-5, 1 - 1e-6)
