"""Tests that the compiled kernels keep the numbers of GGUF files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine import gguf_files
from tests.engine.execution.models.test_gguf import save
from tests.engine.references import Reference, answers
from torch import nn
from transformers import PreTrainedModel

from conveyor_engine.execution import native
from conveyor_engine.execution.models.experts import Experts
from conveyor_engine.execution.models.fuse import fuse_model
from conveyor_engine.execution.models.layers import Attention
from conveyor_engine.execution.models.loader import load_config, load_model
from conveyor_engine.execution.models.packed_linear import NativeLinear, PackedEmbedding
from conveyor_engine.execution.models.quantize import Quantizer
from conveyor_engine.execution.models.quantized.deferred import read_weights
from conveyor_engine.gguf.unpack import unpack
from conveyor_engine.preview.describe import describe
from conveyor_engine.preview.gguf_size import count_gguf_bytes

pytestmark = pytest.mark.skipif(
    native.why_missing() is not None or native.isa() == "generic", reason="needs the compiled kernels, with vectors"
)
# Bits of a number with its scales, in the kernels' layout.
KEPT = {"Q4_0": 4.5, "Q4_K": 4.625, "Q5_0": 5.5, "Q5_K": 5.625, "Q6_K": 6.5625, "Q8_0": 8.5}
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def load(path: Path, dtype: torch.dtype, *, defers: bool = False) -> PreTrainedModel:
    directory = str(unpack(path))
    return load_model(directory, load_config(directory), dtype, torch.device("cpu"), defers=defers)


def fuse(path: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, Quantizer]:
    model = load(path, dtype, defers=True)
    quantizer = Quantizer(model, None)
    fuse_model(model, after=quantizer)
    quantizer.pack_embeddings()
    read_weights(model)
    return model, quantizer


def plain_of(model: PreTrainedModel, path: str) -> torch.Tensor:
    """Return the weights of projections that our layers join."""
    parent, _, name = path.rpartition(".")
    joined = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    return torch.cat([model.get_submodule(f"{parent}.{each}".strip(".")).weight for each in joined.get(name, (name,))])


@TYPES
@pytest.mark.parametrize("kind", KEPT)
def test_the_numbers_of_a_file_are_kept_as_they_are(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    path, _ = save("llama", tmp_path, kind)
    model, quantizer = fuse(path, dtype)
    plain = load(path, torch.float32)
    linears = {path: part for path, part in model.named_modules() if isinstance(part, NativeLinear)}
    assert (quantizer.num_rounded, quantizer.num_kept) == (len(linears), 0)
    for name, linear in linears.items():
        assert isinstance(linear.packed, native.PackedIntegers)
        assert torch.equal(native.unpack_integers(linear.packed), plain_of(plain, name))
        assert linear.packed.data.nbytes * 8 / linear.packed.data.shape[0] / 32 / linear.in_features == KEPT[kind]


@TYPES
@pytest.mark.parametrize("others", ["Q4_K", "Q6_K"])
def test_the_numbers_of_experts_are_kept_as_they_are(
    tmp_path: Path, others: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files have the matrices of all experts in one tensor, and may have other types for gate and for up."""
    write = gguf_files.write_tensor

    def write_gates(writer: Any, name: str, values: gguf_files.Array, kind: str) -> gguf_files.Array:
        return write(writer, name, values, others if "ffn_gate_exps" in name else kind)

    monkeypatch.setattr(gguf_files, "write_tensor", write_gates)
    path, _ = save("qwen3_moe", tmp_path, "Q4_K")
    model, quantizer = fuse(path, dtype)
    plain = load(path, torch.float32)
    assert quantizer.num_kept == 0
    found = {path: part.packed for path, part in model.named_modules() if isinstance(part, Experts)}
    assert found
    for name, packed in found.items():
        original = plain.get_submodule(name)
        for stack, stored in ((packed.gate_up, original.gate_up_proj), (packed.down, original.down_proj)):
            kept = [native.unpack_integers(stack[number]) for number in range(len(stack))]  # type: ignore[arg-type]
            assert torch.equal(torch.stack(kept), stored)
        assert (packed.gate_up.first.bits, packed.down.first.bits) == (4 if others == "Q4_K" else 6, 4)  # type: ignore[union-attr]


@TYPES
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("kind", KEPT)
def test_embeddings_keep_their_numbers_and_share_those_of_a_tied_head(
    tmp_path: Path, kind: str, is_tied: bool, dtype: torch.dtype
) -> None:
    path, _ = save("qwen3", tmp_path, kind, tie_word_embeddings=is_tied)
    model, _ = fuse(path, dtype)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embeddings, PackedEmbedding)
    assert (embeddings._packed is head.packed) == is_tied
    expected = load(path, dtype).get_input_embeddings()
    tokens = torch.tensor([[0, 198, 31], [32, 7, 7]])
    assert torch.equal(embeddings(tokens), expected(tokens))
    assert torch.equal(embeddings.weight, expected.weight)


@TYPES
def test_types_of_one_layer_may_differ(tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Q4_K_M, where half of the values have more bits than queries and keys."""
    write = gguf_files.write_tensor

    def write_values(writer: Any, name: str, values: gguf_files.Array, kind: str) -> gguf_files.Array:
        return write(writer, name, values, "Q6_K" if "attn_v" in name else kind)

    monkeypatch.setattr(gguf_files, "write_tensor", write_values)
    path, _ = save("llama", tmp_path, "Q4_K")
    model, _ = fuse(path, dtype)
    (attention,) = (part for part in model.modules() if isinstance(part, Attention))
    packed = attention.qkv_proj.packed
    assert (packed.bits, packed.group) == (6, 16)
    expected = plain_of(load(path, torch.float32), "model.layers.0.self_attn.qkv_proj")
    assert torch.equal(native.unpack_integers(packed), expected)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("stored", ["Q4_K", "Q8_0", "Q4_1"])
def test_check_counts_the_bytes_that_an_engine_keeps(
    tmp_path: Path, kind: str, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gates have another type, as in Q4_K_M."""
    write = gguf_files.write_tensor
    other = "Q6_K" if stored == "Q4_K" else stored

    def write_mixture(writer: Any, name: str, values: gguf_files.Array, each: str) -> gguf_files.Array:
        return write(writer, name, values, other if "attn_v" in name or "ffn_gate_exps" in name else each)

    monkeypatch.setattr(gguf_files, "write_tensor", write_mixture)
    path, _ = save(kind, tmp_path, stored, tie_word_embeddings=kind == "qwen3", vocab_size=256)
    counted = count_gguf_bytes(unpack(path), keeps_experts=True)
    if stored == "Q4_1":
        assert counted is None
        return
    model, quantizer = fuse(path, torch.bfloat16)
    assert counted == quantizer.num_bytes + sum(each.nbytes for each in model.parameters())
    assert f"{counted / 1e9:.2f} GB of weights: gguf " in "".join(describe(str(path))[1])


def test_types_without_kernels_keep_16_bits(tmp_path: Path) -> None:
    path, _ = save("llama", tmp_path, "Q4_1")
    model, quantizer = fuse(path, torch.bfloat16)
    assert quantizer.num_rounded == 0
    assert type(model.get_input_embeddings()) is nn.Embedding


def test_an_engine_serves_the_numbers_of_a_file(tmp_path: Path) -> None:
    path, model = save("qwen3", tmp_path, "Q4_K")
    runs = Reference.__new__(Reference)
    runs.directory, runs.model = unpack(path), model
    prompts = [torch.randint(6, 199, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (3, 17, 50)]
    whole = answers(runs.make_core(attention_backend="native"), prompts)
    assert answers(runs.make_core(attention_backend="native", max_num_seqs=1), prompts) == whole
