"""Tests that weights of a quantized checkpoint are read when they are packed, each once, and the memory of a start."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.execution.models.test_expert_grids import keep, to_awq, to_int4
from tests.engine.execution.models.test_gguf import SLOW, save
from tests.engine.execution.models.test_quantized import (
    DECLARED,
    WEIGHTS,
    declare,
    load_weights,
    quantize,
    to_fp8,
    to_int8,
)
from tests.engine.references import MAX_TOKENS, Reference, answers
from tests.engine.tiny_models import greedy, save_tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.errors import ModelError
from conveyor_engine.execution import native
from conveyor_engine.execution.build import build_runner
from conveyor_engine.execution.models.divide import divide_model
from conveyor_engine.execution.models.fuse import fuse_model
from conveyor_engine.execution.models.kinds import CAUSAL_LM
from conveyor_engine.execution.models.loader import load_config, load_model
from conveyor_engine.execution.models.quantize import Quantizer
from conveyor_engine.execution.models.quantized.deferred import Deferred, loading, stand_ins
from conveyor_engine.execution.models.quantized.reading import Leaf, Restored, Restoring, Weight
from conveyor_engine.gguf.unpack import unpack

pytestmark = pytest.mark.skipif(
    native.why_missing() is not None or native.isa() == "generic", reason="needs the compiled kernels, with vectors"
)
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
MIB = 2**20


def build(directory: Path) -> Any:
    return build_runner(
        EngineConfig(model=str(directory), device="cpu", dtype="bfloat16", max_model_len=64, kv_memory_fraction=0.01)
    )


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> dict[str, Counter[str]]:
    """Count the rows that are read, by the weight's name: as plain numbers, and as whole ones."""
    restore, counted = Restoring.restore, dict[str, Counter[str]]()

    def count(self: Restoring, name: str, read: Any) -> torch.Tensor:
        tensor = restore(self, name, read)
        if not isinstance(tensor, Deferred):
            counted.setdefault(name, Counter())["plain" if tensor.is_floating_point() else "whole"] += len(tensor)
        return tensor

    monkeypatch.setattr(Restoring, "restore", count)
    return counted


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize(("change", "settings"), [DECLARED["INT8"], DECLARED["FP8"]], ids=["INT8", "FP8"])
def test_each_matrix_is_read_once(
    tmp_path: Path, reads: dict[str, Counter[str]], kind: str, change: Any, settings: Any
) -> None:
    save_tiny_model(kind, tmp_path, hidden_size=64)
    rows = {name: len(weight) for name, weight in load_file(tmp_path / WEIGHTS).items() if weight.dim() > 1}
    quantize(tmp_path, change)
    declare(tmp_path, settings)
    build(tmp_path)
    for name, count in rows.items():
        is_kept = change is to_int8 and "mlp.gate.weight" not in name  # routers have no kernel
        assert reads[name] == {"whole" if is_kept else "plain": count}, name


@pytest.mark.parametrize("stored", ["Q4_K", "Q8_0", "Q4_1"])
def test_each_matrix_of_a_gguf_file_is_read_once(tmp_path: Path, reads: dict[str, Counter[str]], stored: str) -> None:
    path, model = save("llama", tmp_path, stored)
    build(unpack(path))
    kind = "plain" if stored == "Q4_1" else "whole"
    assert {each for name, each in reads.items() if name.endswith("norm.weight") for each in each} == {"plain"}
    of_matrices = {name: each for name, each in reads.items() if "norm" not in name and "token" not in name}
    assert of_matrices
    assert all(set(each) == {kind} for each in of_matrices.values())
    assert reads["blk.0.attn_q.weight"] == {kind: model.config.num_attention_heads * model.config.head_dim}
    assert reads["blk.0.ffn_up.weight"] == {kind: model.config.intermediate_size}


@pytest.mark.parametrize("change", [to_int4, to_awq])
def test_an_engine_answers_with_the_numbers_of_a_checkpoint(tmp_path: Path, change: Any) -> None:
    """They are those of an engine that restores the same weights, but for the rounding of inputs to 8 bits."""
    reference = Reference("qwen3", tmp_path, hidden_size=64)
    quantize(tmp_path, lambda layer, weight: (change if "layers" in layer else keep)(layer, weight))
    declare(tmp_path, PACKED if change is to_int4 else {"quant_method": "awq", "bits": 4, "group_size": 32})
    whole = answers(reference.make_core(attention_backend="native"), reference.prompts)
    assert answers(reference.make_core(attention_backend="native", max_num_seqs=1), reference.prompts) == whole
    restored = answers(reference.make_core(attention_backend="torch"), reference.prompts)
    assert sum(one[0] == other[0] for one, other in zip(whole, restored, strict=True)) >= len(whole) / 2


FAMILIES = ("deepseek_v3", "gemma3_text", "gpt2", "lfm2", "mixtral", "qwen3", "qwen3_5_moe")


@pytest.mark.parametrize("kind", [pytest.param(each, marks=[] if each == "qwen3" else SLOW) for each in FAMILIES])
def test_a_model_generates_the_tokens_of_its_restored_weights(tmp_path: Path, kind: str) -> None:
    """FP8 has no kernel, so no input is rounded. Families have joined experts, states, latents, and tied heads."""
    reference = Reference(kind, tmp_path)
    quantize(tmp_path, lambda layer, weight: (keep if "visual" in layer or "conv" in layer else to_fp8)(layer, weight))
    declare(tmp_path, DECLARED["FP8"][1])
    found = answers(reference.make_core(attention_backend="native"), reference.prompts)
    reference.model.load_state_dict(rename(load_weights(tmp_path, CAUSAL_LM), reference.model), strict=False)
    assert found == [greedy(reference.model, prompt, MAX_TOKENS) for prompt in reference.prompts]


def rename(weights: dict[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
    """Give the weights of a text model their names in a model of images and texts."""
    names = model.state_dict().keys()
    return {name if name in names else name.replace("model.", "model.language_model.", 1): each
            for name, each in weights.items()}  # fmt: skip


@pytest.mark.parametrize("damage", ["scale", "shape"])
@pytest.mark.parametrize("change", [to_int8, to_fp8])
def test_damaged_weights_are_named(tmp_path: Path, change: Any, damage: str) -> None:
    save_tiny_model("llama", tmp_path, hidden_size=64)
    quantize(tmp_path, change)
    declare(tmp_path, dict(DECLARED.values())[change])
    tensors, name = load_file(tmp_path / WEIGHTS), "model.layers.1.mlp.up_proj.weight_scale"
    tensors[name] = torch.tensor(torch.inf) if damage == "scale" else torch.ones(3, 5, 7)
    save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
    problem = "is infinite or NaN" if damage == "scale" else "do not fit"
    with pytest.raises(ModelError, match=rf"is damaged: model.layers.1.mlp.up_proj.weight: .*{problem}") as caught:
        build(tmp_path)
    assert caught.value.reason == "UnsupportedModel"


@pytest.mark.parametrize("change", [to_int8, to_fp8])
def test_too_little_memory_while_weights_are_packed_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    save_tiny_model("llama", tmp_path, hidden_size=64)
    quantize(tmp_path, change)
    declare(tmp_path, dict(DECLARED.values())[change])
    restore = Restoring.restore

    def fail(self: Restoring, name: str, read: Any) -> torch.Tensor:
        def run() -> torch.Tensor:
            if "layers.1" in name:
                raise MemoryError
            tensor: torch.Tensor = read()
            return tensor

        return restore(self, name, run)

    monkeypatch.setattr(Restoring, "restore", fail)
    with pytest.raises(ModelError, match="too little memory") as caught:
        build(tmp_path)
    assert caught.value.reason == "OutOfMemory"


def make_deferred(weight: torch.Tensor) -> Deferred:
    leaf = Leaf("w", lambda: tuple(weight.shape), weight.clone, lambda _: None)
    deferred = Restored(Restoring([], Path(), defers=True), Weight({"": leaf}))[...]
    assert isinstance(deferred, Deferred)
    return deferred


def test_operations_while_a_model_is_loaded_read_nothing_and_are_done_later() -> None:
    weight = torch.arange(24.0).view(4, 6)
    with loading():
        first = make_deferred(weight)
        joined = torch.stack([first, first + 1]).to(torch.bfloat16).transpose(1, 2)[:, :, [2, 0]]
    assert isinstance(joined, Deferred)
    assert (joined.shape, joined.dtype) == ((2, 6, 2), torch.bfloat16)
    expected = torch.stack([weight, weight + 1]).to(torch.bfloat16).transpose(1, 2)[:, :, [2, 0]]
    assert torch.equal(joined.read(), expected)


def test_checks_compute_with_other_numbers_and_read_nothing() -> None:
    weight = make_deferred(torch.ones(4, 6))
    with stand_ins(), torch.inference_mode():
        shown = torch.nn.functional.linear(torch.ones(2, 6), weight)
        assert torch.equal(shown, torch.nn.functional.linear(torch.ones(2, 6), weight))
    assert shown.std() > 0
    assert torch.equal(torch.nn.functional.linear(torch.ones(2, 6), weight), torch.full((2, 4), 6.0))


SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 16, "vocab_size": 2000}
PROGRAM = """
import sys, threading
from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.execution.build import build_runner
import conveyor_engine.execution.models.loader, conveyor_engine.tasks.generate.execution.runner
import transformers.models.llama.modeling_llama

def resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))

peak, before, ends = 0, resident(), threading.Event()
def watch():
    global peak
    while not ends.wait(0.01):
        peak = max(peak, resident())
watcher = threading.Thread(target=watch, daemon=True)
watcher.start()
build_runner(EngineConfig(model=sys.argv[1], device="cpu", dtype="bfloat16", max_model_len=64, max_num_seqs=1,
                          max_num_batched_tokens=64, num_kv_blocks=16))
ends.set()
watcher.join()
print((max(peak, resident()) - before) * 1024)
"""
_REST = 48 * MIB  # the KV cache, one layer for its check, and what Python and torch allocate at a start


# Packs weights as for a GPU. The packed ones are in the host's memory too, because there is no GPU. Kernels do not run.
FOR_A_GPU = """
from conveyor_engine.execution import kernels, native
from conveyor_engine.execution.models import gpu_packing
from conveyor_engine.execution.placement import open_placement
from conveyor_engine.execution.start import RunnerStart
kernels.why_missing, native.why_missing = lambda device: None, lambda: "not wanted"
gpu_packing.compare_linear = lambda *_: ""
def build_runner(config):
    return RunnerStart(config, open_placement(config), lambda line: None).load()
"""
SMALLER = {"W4": (to_int4, PACKED), "W8": DECLARED["INT8"], "FP8": DECLARED["FP8"]}


@pytest.mark.slow
@pytest.mark.parametrize(("stored", "device"), [("W4", "CPU"), ("W8", "CPU"), ("W4", "GPU"), ("FP8", "GPU")])
def test_a_start_needs_the_memory_of_the_weights_in_their_format(tmp_path: Path, stored: str, device: str) -> None:
    plain_bytes = save_large(tmp_path)
    change, settings = SMALLER[stored]
    quantize(tmp_path, change)
    declare(tmp_path, settings)
    limit = int(1.15 * (tmp_path / WEIGHTS).stat().st_size) + _REST
    assert limit < plain_bytes + _REST, "restored weights need more"
    assert measure_start(tmp_path, device) < limit


@pytest.mark.slow
def test_a_start_needs_the_memory_of_restored_weights_once(tmp_path: Path) -> None:
    """CPUs have no kernels for FP8."""
    plain_bytes = save_large(tmp_path)
    change, settings = SMALLER["FP8"]
    quantize(tmp_path, change)
    declare(tmp_path, settings)
    assert measure_start(tmp_path, "CPU") < int(1.15 * plain_bytes) + _REST


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["Q8_0", "Q4_K"])
def test_a_start_needs_the_memory_of_a_gguf_file(tmp_path: Path, stored: str) -> None:
    path, _ = save("llama", tmp_path, stored, **SIZES, num_attention_heads=8, num_key_value_heads=4, head_dim=64)
    assert measure_start(unpack(path), "CPU") < int(1.15 * path.stat().st_size) + _REST


def measure_start(directory: Path, device: str) -> int:
    """Return the most anonymous memory that a start takes."""
    program = PROGRAM if device == "CPU" else PROGRAM.replace("\ndef resident", FOR_A_GPU + "\ndef resident")
    run = subprocess.run(
        [sys.executable, "-c", program, str(directory)],
        capture_output=True,
        text=True,
        check=False,
        # Threads that wait would slow down a machine with other work.
        env=os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"},
    )
    assert run.returncode == 0, run.stderr
    print(f"{int(run.stdout) / MIB:.0f} MiB")
    return int(run.stdout)


def save_large(directory: Path) -> int:
    """Save a model, and return the bytes of its weights in 16 bits."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", **SIZES, num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=128, eos_token_id=None
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory)
    return 2 * sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_keeps_its_share_of_the_numbers(tmp_path: Path, rank: int) -> None:
    save_tiny_model("llama", tmp_path, hidden_size=128, intermediate_size=128, num_attention_heads=4)
    quantize(tmp_path, lambda layer, weight: (to_int4 if "layers" in layer else keep)(layer, weight))
    declare(tmp_path, PACKED)
    directory = str(tmp_path)
    divided, plain = (
        load_model(directory, load_config(directory), torch.float32, torch.device("cpu"), defers=defers)
        for defers in (True, False)
    )
    for model in (divided, plain):
        divide_model(model, rank, 2)
    fuse_model(divided, whole_layers=False, after=Quantizer(divided, None))
    attention, expected = divided.model.layers[0].self_attn, plain.model.layers[0].self_attn
    joined = torch.cat([expected.q_proj.weight, expected.k_proj.weight, expected.v_proj.weight])
    for linear, weight in ((attention.qkv_proj, joined), (attention.o_proj, expected.o_proj.weight)):
        assert torch.equal(native.unpack_integers(linear.packed), weight)


@pytest.mark.parametrize(("kind", "kept"), [("qwen2_5_vl", 1), ("qwen3_vl", 2)])
def test_the_text_model_of_a_model_of_images_and_texts_keeps_its_numbers(tmp_path: Path, kind: str, kept: int) -> None:
    """Its weights have other names in transformers' class than in older files."""
    save_tiny_model(kind, tmp_path)
    quantize(tmp_path, lambda layer, weight: (keep if "visual" in layer else to_int8)(layer, weight))
    declare(tmp_path, DECLARED["INT8"][1])
    directory = str(tmp_path)
    model = load_model(directory, load_config(directory), torch.float32, torch.device("cpu"), defers=True)
    quantizer = Quantizer(model, None)
    fuse_model(model, after=quantizer)
    assert quantizer.num_rounded == 3 * kept, "the products of three layers with 64 inputs; no group divides 48"
