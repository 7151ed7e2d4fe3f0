"""Checks each quantized format against its own library: the files of `formats/`, which that library wrote."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from conveyor_engine.execution.models.quantized.deferred import Deferred, loading
from conveyor_engine.execution.models.quantized.layouts import LAYOUTS
from conveyor_engine.execution.models.quantized.reading import Restored, Restoring, plan_layouts
from conveyor_engine.execution.models.quantized.stored import read_stored
from conveyor_engine.quantization import Declared, read_declared

FORMATS = sorted(path.stem for path in (Path(__file__).parent / "formats").glob("*.safetensors"))


def prepare(directory: Path, name: str) -> torch.Tensor:
    """Make a checkpoint of one weight, and return what the format's library restores."""
    path = Path(__file__).parent / "formats" / f"{name}.safetensors"
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        config = json.loads(file.metadata()["config"])
    expected = tensors.pop("expected")
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"quantization_config": config}))
    return expected.float()


def restore(directory: Path, *, defers: bool = False) -> Restoring:
    declared = read_declared(directory)
    assert declared is not None
    assert not declared.problem
    stored = {each.name: each for each in read_stored(directory, None)}
    return Restoring(plan_layouts(stored, declared), directory, defers=defers)


@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_is_the_one_that_the_format_s_library_restores(tmp_path: Path, name: str) -> None:
    expected = prepare(tmp_path, name)
    restoring = restore(tmp_path)
    ((weight_name, weight),) = restoring.tensors.items()
    assert isinstance(weight, Restored)
    assert weight_name == ("model.proj.gate_up_proj" if name == "mxfp4_experts" else "model.proj.weight")
    rounded = 5e-3 if name == "ct_nvfp4" else 2e-3  # its library computes in bfloat16
    torch.testing.assert_close(weight[...], expected, rtol=rounded, atol=2e-5)


@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_has_its_shape_before_its_numbers_are_read(tmp_path: Path, name: str) -> None:
    prepare(tmp_path, name)
    (weight,) = restore(tmp_path).tensors.values()
    (deferred,) = restore(tmp_path, defers=True).tensors.values()
    with loading():
        found = deferred[...]
    assert isinstance(found, Deferred)
    assert found.shape == weight[...].shape
    assert torch.equal(found.read(), weight[...])


@pytest.mark.parametrize("has_groups", [True, False])
def test_each_weight_of_gptq_has_bits_of_its_own(tmp_path: Path, has_groups: bool) -> None:
    """GPTQModel's `dynamic`: the stored zero points show how many bits a weight has, and its scales the groups."""
    tensors, expected = {}, {}
    for bits in (3, 4, 8):
        expected[f"model.of{bits}.weight"] = prepare(tmp_path, f"gptq_{bits}")
        for name, tensor in load_file(tmp_path / "model.safetensors").items():
            if has_groups or not name.endswith("g_idx"):
                tensors[name.replace("proj", f"of{bits}")] = tensor
    save_file(tensors, tmp_path / "model.safetensors")
    exceptions = {r"+:.*\.of3": {"bits": 3}, r"+:.*\.of8": {"bits": 8, "group_size": 32}, r"-:.*\.lm_head": {}}
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "dynamic": exceptions}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    restoring = restore(tmp_path)
    assert set(restoring.tensors) == set(expected)
    for name, weight in expected.items():
        torch.testing.assert_close(restoring.tensors[name][...], weight, rtol=2e-3, atol=2e-5)
    declared = read_declared(tmp_path)
    assert declared is not None
    assert (declared.kept_bits, declared.kept_on_gpus) == (0, 0), "not all have the same"
    exceptions[r"+:.*\.of5"] = {"bits": 5}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    declared = read_declared(tmp_path)
    assert declared is not None
    assert declared.problem == "only 2, 3, 4, 8 bits of GPTQ are read"


@pytest.mark.parametrize(("name", "bits"), [("quark_mxfp4", 4), ("quark_fp8", 8), ("quark_int8", 0)])
def test_gpus_keep_the_numbers_of_quark_if_they_know_those_of_all_layers(tmp_path: Path, name: str, bits: int) -> None:
    prepare(tmp_path, name)
    declared = read_declared(tmp_path)
    assert declared is not None
    assert (declared.kept_bits, declared.kept_on_gpus) == (0, bits)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["layer_quant_config"] = {"*down_proj": {"weight": {"dtype": "int8"}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    declared = read_declared(tmp_path)
    assert declared is not None
    assert declared.kept_on_gpus == 0


@pytest.mark.parametrize("settings", [{"quant_algo": ["FP8"]}, {"quantized_layers": {"a": {"quant_algo": {}}}}])
def test_algorithms_that_are_no_names_are_those_of_another_format(tmp_path: Path, settings: dict[str, object]) -> None:
    config = {"quantization_config": {"quant_method": "modelopt", **settings}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    declared = read_declared(tmp_path)
    assert declared is not None
    assert declared.kept_on_gpus == 0


def test_groups_of_gptq_that_do_not_fit_are_found() -> None:
    parts = {"qweight": torch.zeros(4, 32, dtype=torch.int32), "qzeros": torch.zeros(3, 4, dtype=torch.int32)}
    with pytest.raises(ValueError, match="3 groups do not fit 32 columns"):
        LAYOUTS["gptq"][0].restore(parts | {"scales": torch.ones(3, 32)}, Declared("gptq", "gptq", "config.json"))


def test_modelopt_s_nvfp4_is_that_of_compressed_tensors_with_an_inverted_scale(tmp_path: Path) -> None:
    expected = prepare(tmp_path, "ct_nvfp4")
    tensors = load_file(tmp_path / "model.safetensors")
    stem = "model.proj.weight"
    renamed = {
        stem: tensors[f"{stem}_packed"],
        f"{stem}_scale": tensors[f"{stem}_scale"],
        f"{stem}_scale_2": 1 / tensors[f"{stem}_global_scale"][0],
        "model.proj.input_scale": torch.tensor(0.5),
    }
    save_file(renamed, tmp_path / "model.safetensors")
    settings = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(settings))
    restoring = restore(tmp_path)
    assert list(restoring.tensors) == [stem], "scales of activations are left out"
    torch.testing.assert_close(restoring.tensors[stem][...], expected, rtol=5e-3, atol=2e-5)


def test_numbers_with_powers_of_two_as_scales_are_restored(tmp_path: Path) -> None:
    """MXFP8, as ModelOpt and DeepSeek's `ue8m0` store it."""
    weight = torch.randn(4, 64).to(torch.float8_e4m3fn)
    exponents = torch.randint(120, 130, (4, 2), dtype=torch.uint8)
    save_file({"layer.weight": weight, "layer.weight_scale": exponents}, tmp_path / "model.safetensors")
    settings = {"quant_method": "modelopt", "quant_algo": "MXFP8"}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    expected = weight.float() * (2.0 ** (exponents.float() - 127)).repeat_interleave(32, 1)
    assert torch.equal(restore(tmp_path).tensors["layer.weight"][...], expected)


def test_blocks_have_128_rows_and_columns_if_fp8_does_not_say_it(tmp_path: Path) -> None:
    weight, scale = torch.randn(250, 8).to(torch.float8_e4m3fn), torch.tensor([[1.0], [2.0]])
    save_file({"layer.weight": weight, "layer.weight_scale_inv": scale}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    expected = weight.float() * scale[torch.arange(250) // 128]
    assert torch.equal(restore(tmp_path).tensors["layer.weight"][...], expected)


def test_the_last_block_of_a_weight_may_be_smaller(tmp_path: Path) -> None:
    weight, scale = torch.randn(5, 7).to(torch.float8_e4m3fn), torch.rand(2, 3) + 1
    save_file({"layer.weight": weight, "layer.weight_scale_inv": scale}, tmp_path / "model.safetensors")
    settings = {"quant_method": "fp8", "weight_block_size": [4, 3]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    expected = weight.float() * scale[torch.arange(5) // 4][:, torch.arange(7) // 3]
    assert torch.equal(restore(tmp_path).tensors["layer.weight"][...], expected)


@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_scale_is_found(tmp_path: Path, name: str) -> None:
    prepare(tmp_path, name)
    tensors = load_file(tmp_path / "model.safetensors")
    scale = next(key for key in tensors if key.rpartition(".")[2].rpartition("_")[2] in DAMAGED)
    if tensors[scale].dtype == torch.uint8 and scale.endswith(("scale", "scales")):
        tensors[scale].fill_(255)  # NaN, as an E8M0 number
    elif tensors[scale].dtype == torch.uint8:
        tensors["model.proj.weight.nested_absmax"].fill_(torch.inf)
    else:
        tensors[scale] = torch.full_like(tensors[scale].float(), torch.nan).to(tensors[scale].dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    restoring = restore(tmp_path)
    (weight,) = restoring.tensors.values()
    with pytest.raises(ValueError, match="infinite or NaN"):
        weight[...]
    assert "infinite or NaN" in restoring.failure


DAMAGED = ("scale", "scales", "inv", "absmax", "SCB")


@pytest.mark.parametrize("name", ["ct_int4_group", "ct_fp8_block", "awq", "gptq_4", "fp8_block", "ct_nvfp4"])
def test_scales_of_another_shape_are_found(tmp_path: Path, name: str) -> None:
    prepare(tmp_path, name)
    tensors = load_file(tmp_path / "model.safetensors")
    scale = next(key for key in tensors if key.rpartition(".")[2].rpartition("_")[2] in DAMAGED)
    tensors[scale] = torch.ones(7, 3).to(tensors[scale].dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    restoring = restore(tmp_path)
    (weight,) = restoring.tensors.values()
    with pytest.raises(ValueError, match=r"model\.proj"):
        weight[...]
    assert restoring.failure


HUGE = 1 << 46  # numbers that no machine can allocate
WORDS = torch.zeros(4, 12, dtype=torch.int32)
TABLE = {"": torch.zeros(32, 1, dtype=torch.uint8), ".quant_map": torch.zeros(16)}


def _table(absmax: int = 1, **settings: object) -> dict[str, torch.Tensor]:
    state = json.dumps({"shape": [8, 8], "blocksize": 64} | settings).encode()
    parts = TABLE | {".absmax": torch.zeros(absmax), ".quant_state.bitsandbytes__nf4": torch.tensor(list(state))}
    return parts | (
        {".absmax": torch.zeros(absmax, dtype=torch.uint8), ".nested_absmax": torch.ones(1)}
        | {".nested_quant_map": torch.ones(256)}
        if "nested_blocksize" in settings
        else {}
    )


# Small files whose numbers ask for memory without a limit.
EXCESSIVE: dict[str, tuple[str, int, dict[str, torch.Tensor]]] = {
    "rows of packed words": (
        "compressed-tensors",
        0,
        {"_packed": WORDS, "_scale": torch.ones(4, 1), "_shape": torch.tensor([HUGE, 128]), "_zero_point": WORDS},
    ),
    "columns of packed words": (
        "compressed-tensors",
        0,
        {"_packed": WORDS, "_scale": torch.ones(4, 1), "_shape": torch.tensor([4, HUGE])},
    ),
    "groups of columns": (
        "compressed-tensors",
        0,
        {"_packed": WORDS, "_scale": torch.ones(4, 1), "_shape": torch.tensor([4, 96])}
        | {"_g_idx": torch.zeros(1, dtype=torch.int32).expand(HUGE)},
    ),
    "scales": (
        "modelopt",
        -1,
        {"": torch.zeros(1, 1).expand(1 << 23, 1), "_scale": torch.ones(1, 1).expand(2, 1 << 23)},
    ),
    "blocks": ("bitsandbytes", 0, _table(2, blocksize=HUGE)),
    "nested blocks": (
        "bitsandbytes",
        0,
        _table(nested_blocksize=HUGE, nested_offset=0.0) | {".nested_absmax": torch.ones(2)},
    ),
    "shape": ("bitsandbytes", 0, _table(shape=[HUGE, HUGE])),
    "no block": ("bitsandbytes", 0, _table(blocksize=0)),
    "less than a block": ("bitsandbytes", 0, _table(blocksize=-64)),
}


@pytest.mark.parametrize("name", EXCESSIVE)
def test_numbers_in_a_file_never_decide_how_much_memory_is_used(name: str) -> None:
    method, number, parts = EXCESSIVE[name]
    with pytest.raises(ValueError, match="do not fit"):
        LAYOUTS[method][number].restore(parts, Declared(method, method, "config.json"))


DAMAGED_PARTS: dict[str, tuple[str, int, dict[str, torch.Tensor], str]] = {
    "a negative group of GPTQ": (
        "gptq",
        0,
        {"qweight": torch.zeros(4, 8, dtype=torch.int32), "qzeros": torch.zeros(2, 1, dtype=torch.int32)}
        | {"scales": torch.ones(2, 8), "g_idx": torch.tensor([0, 1] * 15 + [-1, 0])},
        "a column's group is -1",
    ),
    "a negative group of packed words": (
        "compressed-tensors",
        0,
        {"_packed": WORDS, "_scale": torch.ones(4, 3), "_shape": torch.tensor([4, 96])}
        | {"_g_idx": torch.tensor([0, -2] * 48)},
        "a column's group is -2",
    ),
    "no nested blocks": (
        "bitsandbytes",
        0,
        _table(nested_blocksize=None) | {".nested_absmax": torch.ones(1)},
        "the state of the table has no nested_blocksize of type int",
    ),
    "no nested offset": (
        "bitsandbytes",
        0,
        _table(nested_blocksize=64) | {".nested_absmax": torch.ones(1)},
        "the state of the table has no nested_offset of type float",
    ),
    "a state that is no object": (
        "bitsandbytes",
        0,
        TABLE | {".absmax": torch.zeros(1), ".quant_state.bitsandbytes__nf4": torch.tensor(list(b"[]"))},
        "the state of the table has no shape of type list",
    ),
}


@pytest.mark.parametrize("name", DAMAGED_PARTS)
def test_damage_is_described(name: str) -> None:
    method, number, parts, problem = DAMAGED_PARTS[name]
    with pytest.raises(ValueError, match=problem):
        LAYOUTS[method][number].restore(parts, Declared(method, method, "config.json"))


def test_packed_columns_without_an_order_have_the_group_minus_1() -> None:
    declared = Declared("compressed-tensors", "int4", "config.json")
    packed = {"_packed": torch.arange(48, dtype=torch.int32).view(4, 12), "_scale": torch.rand(4, 3)}
    packed["_shape"] = torch.tensor([4, 96])
    restore_packed = LAYOUTS["compressed-tensors"][0].restore
    groups = {"_g_idx": torch.full((96,), -1)}
    assert torch.equal(restore_packed(packed | groups, declared), restore_packed(packed, declared))


def test_one_block_may_be_larger_than_its_weight() -> None:
    parts = _table(blocksize=HUGE, nested_blocksize=HUGE, nested_offset=1.0)
    restored = LAYOUTS["bitsandbytes"][0].restore(parts, Declared("bitsandbytes", "nf4", "config.json"))
    assert restored.shape == (8, 8)


@pytest.mark.parametrize(
    ("groups", "blocks"),
    [
        ({"g": {"weights": {"block_structure": "128x64"}}}, (128, 64)),
        ({"g": {"weights": {"block_structure": [128, 64]}}}, (128, 64)),
        *((groups, (None, None)) for groups in ("x", {"g": "x"}, {"g": {"weights": "x"}}, {"g": None}, ["x"])),
        *(({"g": {"weights": {"block_structure": b}}}, (None, None)) for b in ("0x1", "x", [0, 1], [1], 7)),
    ],
)
def test_blocks_are_read_whatever_their_declaration_is(
    tmp_path: Path, groups: object, blocks: tuple[int | None, int | None]
) -> None:
    config = {"quant_method": "compressed-tensors", "config_groups": groups}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    declared = read_declared(tmp_path)
    assert declared is not None
    assert declared.blocks == blocks
