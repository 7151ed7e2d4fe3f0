"""Compares what `check MODEL` says of a model with what an engine that loads it has."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.classifiers import save_classifier
from tests.engine.encoders import save_encoder
from tests.engine.fetching.hubs import running_hub
from tests.engine.gguf_files import write_model
from tests.engine.paint_layouts import save_layout
from tests.engine.paint_models import change_json
from tests.engine.references import Reference
from tests.engine.seeing_models import FAMILIES
from tests.engine.tiny_models import save_tiny_model
from tests.engine.token_models import write_colbert, write_m3, write_splade
from transformers import AutoConfig

from conveyor_engine.__main__ import main
from conveyor_engine.errors import ConfigError
from conveyor_engine.execution import native
from conveyor_engine.execution.models.fuse import fuse_model
from conveyor_engine.execution.models.loader import load_config, load_model
from conveyor_engine.execution.models.quantize import Quantizer, count_bytes
from conveyor_engine.execution.placement import open_placement
from conveyor_engine.preview.describe import describe
from conveyor_engine.tasks.generate.execution.runner import GenerateRunner


def lines_of(directory: Path) -> dict[str, str]:
    runs, lines = describe(str(directory))
    assert runs, lines
    return {line[:9].strip(): line[9:] for line in lines}


@pytest.mark.parametrize("kind", ["qwen3", "deepseek_v3", "qwen3_5_text"])
def test_weights_and_cache_are_those_of_an_engine(tmp_path: Path, kind: str) -> None:
    reference = Reference(kind, tmp_path)
    config = reference.make_config(dtype="bfloat16", num_kv_blocks=64)
    caches = GenerateRunner(config, open_placement(config)).backend.caches
    tensors = [cache.numbers for layer in range(3) for cache in caches(layer)]
    bytes_of = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    lines = lines_of(tmp_path)
    assert f"; {reference.model.num_parameters():,} parameters" in lines["weights"]
    assert lines["cache"].startswith(f"{sum(bytes_of.values()) // (64 * config.block_size):,} bytes a token")
    assert ("of states a request" in lines["cache"]) == (kind == "qwen3_5_text")
    assert "L4, A10G (24 GB): 256" in lines["fits"]


def test_the_outputs_of_a_model_that_embeds_are_named(tmp_path: Path) -> None:
    write_splade("bert", tmp_path / "splade")
    write_colbert("bert", tmp_path / "colbert", "stanford")
    write_m3(tmp_path / "m3")
    for path in tmp_path.glob("*/*.safetensors"):
        path.unlink()
    assert lines_of(tmp_path / "splade")["makes"] == "sparse vectors (/embed_sparse)"
    assert lines_of(tmp_path / "colbert")["makes"].startswith("vectors of tokens (/pooling with task token_embed), ")
    assert lines_of(tmp_path / "m3")["makes"].startswith("vectors of whole texts (/v1/embeddings), ")
    assert lines_of(tmp_path / "m3")["makes"].endswith(", sparse vectors (/embed_sparse)")


def test_a_head_in_the_files_is_counted_by_itself(tmp_path: Path) -> None:
    save_tiny_model("deepseek_v3", tmp_path, moe_intermediate_size=4096)
    line = lines_of(tmp_path)["head"]
    # Three experts and the shared one have three matrices each; latents of 16 and 8 numbers, and a hidden state of 48.
    assert line == f"0.01 GB more, and {2 * (16 + 8) + 2 * 48} bytes a token, with `speculation: MTP`, on CPUs"
    save_tiny_model("deepseek_v3", tmp_path, num_nextn_predict_layers=0)
    assert "head" not in lines_of(tmp_path)


def test_a_model_whose_head_cannot_be_computed_runs_without_it(tmp_path: Path) -> None:
    save_tiny_model("nemotron_h", tmp_path, num_nextn_predict_layers=1)
    assert "head" not in lines_of(tmp_path)


def test_the_cache_of_layers_with_a_window_is_counted_within_it(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "num_hidden_layers": 12,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
    }
    changes |= {"max_position_embeddings": 32_768, "num_key_value_heads": 4, "head_dim": 256}
    lines = {}
    for window in (512, None):
        save_tiny_model("gemma3_text", tmp_path / str(window), sliding_window=window or 2**15, **changes)
        lines[window] = lines_of(tmp_path / str(window))
    token = 12 * 2 * 4 * 256 * 2
    assert lines[512]["cache"].startswith(
        f"{token:,} bytes a token, {token * 10 // 12:,} of them only for the last 512 tokens; "
    )
    mib = {window: int(line["cache"].rpartition("; ")[2].split()[0].replace(",", "")) for window, line in lines.items()}
    assert mib[None] == token * 4096 // 2**20
    # Two layers keep 4,096 tokens, and ten those of the window.
    assert mib[512] == token * (2 * 4096 + 10 * 512) // 12 // 2**20
    assert lines[512]["tested"] == "Gemma 3, texts only; the engine's own code computes whole layers"


def test_an_encoder_that_knows_only_transformers_attention_is_described(tmp_path: Path) -> None:
    config = AutoConfig.for_model("deepseek_ocr2", **FAMILIES["deepseek_ocr2"].config)
    config.architectures = ["DeepseekOcr2ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    assert lines_of(tmp_path)["runs"].startswith("DeepseekOcr2ForConditionalGeneration, task generate")


def test_a_pipeline_is_described_by_its_class_or_refused(tmp_path: Path) -> None:
    save_layout(tmp_path, "xl")
    lines = lines_of(tmp_path)
    assert lines["runs"] == "StableDiffusionXLPipeline, task imagegenerate; its memory is measured at the start"
    stored = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert (lines["tested"], lines["weights"]) == ("Stable Diffusion XL", f"{stored / 1e9:.2f} GB stored")
    change_json(tmp_path / "model_index.json", text_encoder_2=["mine", "Encoder"])
    runs, refusal = describe(str(tmp_path))
    assert not runs
    assert refusal[0].startswith("refused  the model's text_encoder_2 is a Encoder")


def test_a_repository_is_described_without_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "org" / "tiny"
    folder.mkdir(parents=True)
    save_tiny_model("qwen3", folder)
    (folder / "tokenizer.json").write_text("{}")
    size = (folder / "model.safetensors").stat().st_size
    with running_hub(tmp_path) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        runs, lines = describe("org/tiny")
        assert runs, lines
        assert f"; {size / 1e9:.2f} GB stored; " in lines[2]
        (folder / "model.safetensors").unlink()
        assert describe("hf://org/tiny")[1][0].startswith("refused  org/tiny@")
    assert describe("hf://org/tiny:Q8_0")[1] == [
        "refused  a GGUF file is checked when it is on this machine; give its path"
    ]


def test_a_gguf_file_is_described(tmp_path: Path) -> None:
    model = save_tiny_model("qwen2", tmp_path, hidden_size=32)
    (tmp_path / "served").mkdir()
    write_model(model, tmp_path / "served" / "a.gguf", "Q8_0")
    assert ", restored from gguf Q8_0; 0.00 GB stored" in lines_of(tmp_path / "served" / "a.gguf")["weights"]


@pytest.mark.parametrize("task", ["embed", "rerank", "classify"])
def test_models_without_a_cache_are_described(tmp_path: Path, task: str) -> None:
    if task == "embed":
        save_encoder("mpnet", tmp_path)
    else:
        save_classifier("bert", tmp_path, 1 if task == "rerank" else 3)
    lines = lines_of(tmp_path)
    assert f"task {task}" in lines["runs"]
    assert lines["fits"].startswith("L4")
    assert "cache" not in lines


def test_a_rejected_model_is_named_with_the_way_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny_model("llama", tmp_path)
    change(tmp_path, model_type="bloom", architectures=["BloomForCausalLM"])
    assert main(["check", str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith(
        "refused  BloomForCausalLM does not use transformers' attention interface"
    )


@pytest.mark.skipif(native.why_missing() is not None or native.isa() == "generic", reason="needs the compiled kernels")
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "gpt_oss", "gpt2"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_rounded_weights_have_the_bytes_that_an_engine_keeps(tmp_path: Path, kind: str, is_tied: bool) -> None:
    save_tiny_model(kind, tmp_path, hidden_size=64, vocab_size=256, tie_word_embeddings=is_tied)
    for quantization, bits in (("int8", 8), ("int4", 4)):
        config = load_config(str(tmp_path))
        model = load_model(str(tmp_path), config, torch.bfloat16, torch.device("cpu"))
        counted = count_bytes(model, bits)
        quantizer = Quantizer(model, quantization)
        fuse_model(model, after=quantizer)
        if kind.startswith("gpt"):
            assert counted is None
            with pytest.raises(ConfigError):
                quantizer.check_share()
        else:
            assert counted == quantizer.num_bytes + sum(each.nbytes for each in model.parameters())
            quantizer.check_share()
    lines = lines_of(tmp_path)
    assert ("rounded" in lines) == kind.startswith("qwen")


KEPT = [
    {"quant_method": "awq", "bits": 4, "group_size": 128},
    {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": False},
    {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int", "symmetric": True}}},
    },
]
RESTORED = [
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True},
    {"quant_method": "gptq", "bits": 8, "group_size": 128},
    {"quant_method": "awq", "bits": 4, "group_size": 16},
    {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}},
    {"quant_method": "fp8"},
    {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float"}}}},
    {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"},
]


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("settings", [*KEPT, *RESTORED])
def test_published_bits_are_counted_where_a_device_keeps_them(
    tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    save_tiny_model(kind, tmp_path, hidden_size=64, moe_intermediate_size=64)
    change(tmp_path, quantization_config=settings)
    lines = lines_of(tmp_path)
    on_gpu = settings in KEPT or settings in RESTORED[-4:] or (settings.get("desc_act") and kind == "llama")
    for place, is_kept in (("cpu", settings in KEPT), ("gpu", on_gpu)):
        assert (place in lines) == bool(is_kept)
        assert lines.get(place, "0.00 GB of weights: ").startswith("0.00 GB of weights: ")


FP4 = {"weights": {"num_bits": 4, "type": "float"}}
MIXED: list[dict[str, Any]] = [
    {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": FP4, "group_1": {"weights": {"num_bits": 8, "type": "float"}}},
    },
    {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4"}},
    },
]


@pytest.mark.parametrize("settings", MIXED)
def test_numbers_of_several_bits_are_counted_with_the_most(tmp_path: Path, settings: dict[str, Any]) -> None:
    save_tiny_model("llama", tmp_path, hidden_size=512)
    change(tmp_path, quantization_config={"quant_method": "fp8"})
    whole = lines_of(tmp_path)["gpu"].partition(" of")[0]
    change(tmp_path, quantization_config=settings)
    assert lines_of(tmp_path)["gpu"].startswith(f"about {whole} of weights: ")
    settings = {"quant_method": "compressed-tensors", "config_groups": {"group_0": FP4, "group_1": {"weights": {}}}}
    change(tmp_path, quantization_config=settings)
    assert "gpu" not in lines_of(tmp_path), "the kernels do not know one group"


_GROUP = {"weights": {"num_bits": 4, "type": "int", "group_size": 32}, "targets": ["Linear"]}
_MLP = r"re:.*mlp\.(gate|up|down)_proj$"
_CT: dict[str, Any] = {"quant_method": "compressed-tensors", "config_groups": {"group_0": _GROUP}}
_AUTO_ROUND = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 32}
PARTLY: dict[str, dict[str, Any]] = {  # the attention of Qwen has 16 bits
    "names": _CT | {"ignore": [f"model.layers.{i}.self_attn.{p}_proj" for i in range(3) for p in "qkvo"] + ["lm_head"]},
    "expressions": _CT | {"ignore": ["lm_head", "re:.*self_attn.*"]},
    "targets": _CT | {"config_groups": {"group_0": _GROUP | {"targets": [_MLP, r"re:.*experts\..*"]}}},
    "ends of names": {"quant_method": "awq", "bits": 4, "group_size": 32, "modules_to_not_convert": ["self_attn"]},
    "wildcards": {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["*self_attn*", "lm_head"]},
    "another prefix": _CT | {"ignore": ["re:model.language_model.*self_attn.*", "re:^model.layers.*self_attn"]},
    "dynamic": {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {r"-:.*self_attn\..*": {}}},
    "AutoRound": _AUTO_ROUND
    | {"extra_config": {f"model.layers.{i}.self_attn.{p}_proj": {"bits": 16} for i in range(3) for p in "qkvo"}},
    "a damaged expression": _CT | {"ignore": ["re:(", "re:.*self_attn.*"]},
}


@pytest.mark.parametrize(("kind", "name"), [("qwen3_moe", "targets"), *(("qwen3", name) for name in PARTLY)])
def test_layers_that_are_declared_as_not_quantized_have_16_bits(
    tmp_path: Path, kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conveyor_engine.preview.describe._gb", str)  # bytes, because the model is small
    model = save_tiny_model(kind, tmp_path, hidden_size=64, moe_intermediate_size=64, intermediate_size=512)
    change(tmp_path, quantization_config=PARTLY[name])
    sizes = {path: each.numel() for path, each in model.named_parameters()}
    kept = {path for path in sizes if "mlp" in path and not path.endswith("mlp.gate.weight")}
    expected = sum(count * (4.5 if path in kept else 16) / 8 for path, count in sizes.items())
    lines = lines_of(tmp_path)
    assert lines["gpu"].startswith(f"{expected:.0f} of weights")
    if PARTLY[name]["quant_method"] != "modelopt":
        assert lines["cpu"].startswith(f"{expected:.0f} of weights")


def test_the_experts_of_gpt_oss_are_counted_as_a_gpu_keeps_them(tmp_path: Path) -> None:
    model = save_tiny_model("gpt_oss", tmp_path, hidden_size=64, intermediate_size=512)
    change(tmp_path, quantization_config={"quant_method": "mxfp4"})
    all_bytes = sum(2 * each.numel() for each in model.parameters())
    kept = sum(each.numel() for name, each in model.named_parameters() if "experts" in name and each.dim() == 3)
    expected = all_bytes - kept * (16 - 4.5) / 8
    assert lines_of(tmp_path)["gpu"] == f"{expected / 1e9:.2f} GB of weights: mxfp4 is kept"
    assert "cpu" not in lines_of(tmp_path)


def test_a_quantized_model_has_the_bytes_of_16_bits_and_those_of_its_files(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    change(tmp_path, quantization_config={"quant_method": "awq", "bits": 4})
    assert ", restored from awq 4 bits; 0.00 GB stored" in lines_of(tmp_path)["weights"]


def change(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_an_expression_that_takes_too_long_refuses_the_model_and_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conveyor_engine.preview.describe._CPU_SECONDS", 1.0)
    save_tiny_model("qwen3", tmp_path, hidden_size=64, intermediate_size=512)
    change(tmp_path, quantization_config=_CT | {"ignore": [r"re:(\w+\.?)+!"]})
    runs, (line,) = describe(str(tmp_path))
    assert not runs
    assert "the list of layers in config.json takes more than 1 s of CPU time" in line


def test_thousands_of_names_take_no_time_for_each_layer(tmp_path: Path) -> None:
    """As checkpoints with experts have them, in less than the limit of processor time."""
    save_tiny_model("qwen3", tmp_path, hidden_size=64, intermediate_size=512)
    names = [f"model.layers.{number}.mlp.experts.{number}.down_proj" for number in range(3, 50_000)]
    change(tmp_path, quantization_config=_CT | {"ignore": names})
    assert "gpu" in lines_of(tmp_path)
