"""Writes the files of this folder: one weight in each format, by the format's own library, beside what that restores.

    python make.py FOLDER_OF_AUTOAWQ_AND_AUTO_GPTQ

Run by hand, with compressed-tensors 0.20.1, bitsandbytes 0.50.2, transformers 5.23.0, amd-quark 0.13, and the unpacked
packages autoawq 0.2.9 and auto-gptq 0.7.1, of which only the files that pack are used. The engine needs none of them.
Each file has the stored tensors under `model.proj.`, the library's restored weight as `expected`, and in its metadata
the entry `quantization_config` of config.json.
"""

import importlib.util
import json
import sys
import tempfile
import types
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
OTHERS = Path(sys.argv[1])
ROWS, COLUMNS = 32, 64


def save(name, tensors, expected, config, stem="model.proj."):
    stored = {stem + end: tensor.contiguous() for end, tensor in tensors.items()}
    path = HERE / f"{name}.safetensors"
    save_file({**stored, "expected": expected.float().half().contiguous()}, path, {"config": json.dumps(config)})
    print(name, {key: tuple(tensor.shape) for key, tensor in stored.items()}, path.stat().st_size)


def make_weight():
    torch.manual_seed(0)
    return torch.randn(ROWS, COLUMNS) * 0.05


def make_compressed_tensors():
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    cases = {
        "ct_fp8_tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, ()),
        "ct_fp8_channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, (ROWS, 1)),
        "ct_fp8_block": (
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [48, 48]},
            (1, 2),
        ),
        "ct_int8_channel": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, (ROWS, 1)),
        "ct_int4_group": (
            "pack-quantized",
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
            (ROWS, COLUMNS // 32),
        ),
        "ct_int4_group_zeros": (
            "pack-quantized",
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
            (ROWS, COLUMNS // 32),
        ),
        "ct_int3_channel": ("pack-quantized", {"num_bits": 3, "type": "int", "strategy": "channel"}, (ROWS, 1)),
        "ct_nvfp4": (
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            (ROWS, COLUMNS // 16),
        ),
        "ct_mxfp4": (
            "mxfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
            (ROWS, COLUMNS // 32),
        ),
    }
    for name, (form, settings, shape) in cases.items():
        args = QuantizationArgs(**settings)
        weight = make_weight()
        largest = {"float": {8: 448, 4: 6}, "int": {8: 127, 4: 7, 3: 3}}[settings["type"]][settings["num_bits"]]
        scale = torch.full(shape or (1,), float(weight.abs().max()) / largest)
        scale = scale * (0.75 + torch.rand(scale.shape) / 4)
        state = {"weight": weight, "weight_scale": scale}
        if form == "mxfp4-pack-quantized":
            state["weight_scale"] = torch.exp2(torch.floor(torch.log2(scale)))
        if form == "nvfp4-pack-quantized":
            state["weight_global_scale"] = torch.tensor([448 / float(scale.max())])
            state["weight_scale"] = (scale * state["weight_global_scale"]).to(torch.float8_e4m3fn).float()
        if settings.get("symmetric") is False:
            state["weight_zero_point"] = torch.randint(-8, 8, scale.shape, dtype=torch.int8)
        scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
        compressor = BaseCompressor.get_value_from_registry(form)
        stored = compressor.compress(state, scheme)
        stored = {key: value for key, value in stored.items() if value is not None}
        if name == "ct_nvfp4":
            stored["weight_scale"] = stored["weight_scale"].to(torch.float8_e4m3fn)
        expected = compressor.decompress(dict(stored), scheme)["weight"]
        group = {"targets": ["Linear"], "weights": json.loads(args.model_dump_json(exclude_none=True))}
        config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
        save(name, stored, expected, config)


def make_bitsandbytes():
    import bitsandbytes.functional as bnb

    for name, kind, nested in (("bnb_nf4", "nf4", False), ("bnb_nf4_nested", "nf4", True), ("bnb_fp4", "fp4", False)):
        packed, state = bnb.quantize_4bit(make_weight(), quant_type=kind, blocksize=64, compress_statistics=nested)
        tensors = {f"weight.{end}": value for end, value in state.as_dict(packed=True).items()}
        config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
        save(name, {"weight": packed, **tensors}, bnb.dequantize_4bit(packed, state), config)
    numbers, largest, _ = bnb.int8_vectorwise_quant(make_weight().half())
    stored = {"weight": numbers, "SCB": largest, "weight_format": torch.zeros((), dtype=torch.uint8)}
    expected = bnb.int8_vectorwise_dequant(numbers, largest)
    save("bnb_int8", stored, expected, {"quant_method": "bitsandbytes", "load_in_8bit": True})


def import_file(path, name, **names):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    for other, content in names.items():
        sys.modules.setdefault(other, content)
    spec.loader.exec_module(module)
    return module


def make_awq():
    root = next(OTHERS.glob("autoawq-*")) / "awq"
    packing = import_file(root / "utils" / "packing_utils.py", "packing_utils")
    for name in ("awq", "awq.utils", "awq.utils.module", "awq.utils.utils"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["awq.utils.module"].try_import = lambda name: (None, "")
    sys.modules["awq.utils.utils"].get_best_device = lambda: "cpu"
    sys.modules["awq.utils.packing_utils"] = packing
    gemm = import_file(root / "modules" / "linear" / "gemm.py", "gemm")
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    linear.weight.data = make_weight()
    scales = (make_weight().abs().view(ROWS, -1, 32).amax(-1).t() / 5).half()  # (groups, rows)
    zeros = torch.randint(4, 12, scales.shape).float()
    low, high = (-zeros * scales).repeat_interleave(32, 0).t(), ((15 - zeros) * scales).repeat_interleave(32, 0).t()
    linear.weight.data = linear.weight.data.clamp(low, high)
    packed = gemm.WQLinear_GEMM.from_linear(linear, 4, 32, scales=scales, zeros=zeros)
    stored = {"qweight": packed.qweight, "qzeros": packed.qzeros, "scales": packed.scales}
    expected = packing.dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, 32).t()
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
    save("awq", stored, expected, config)


def make_gptq():
    path = OTHERS / "ag" / "auto_gptq" / "nn_modules" / "qlinear" / "qlinear_cuda.py"
    module = import_file(path, "qlinear_cuda")
    cases = (("gptq_4", 4, False), ("gptq_4_act_order", 4, True), ("gptq_3", 3, False), ("gptq_8", 8, False))
    for name, bits, ordered in cases:
        largest = 2**bits - 1
        groups = torch.arange(COLUMNS) // 32
        if ordered:
            groups = groups[torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(1))]
        scales = (0.02 + torch.rand(ROWS, 2) / 50) * 8 / largest
        scales = scales.half().float()
        zeros = torch.randint(1, largest, (ROWS, 2)).float()
        layer = torch.nn.Linear(COLUMNS, ROWS, bias=False)
        numbers = torch.randint(0, largest + 1, (ROWS, COLUMNS))
        layer.weight.data = (numbers - zeros[:, groups]) * scales[:, groups]
        packed = module.QuantLinear(bits, 32, COLUMNS, ROWS, bias=False)
        packed.pack(layer, scales.clone(), zeros.clone(), groups.int())
        identity = torch.eye(COLUMNS)
        packed.autogptq_cuda_available = False
        expected = packed(identity).t()
        stored = {"qweight": packed.qweight, "qzeros": packed.qzeros, "scales": packed.scales, "g_idx": packed.g_idx}
        config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": ordered, "sym": False}
        save(name, stored, expected, config)


def make_transformers():
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    weight = make_weight()
    scale = torch.rand(1, 2) / 1000 + 0.0005
    stored = (weight / scale.repeat_interleave(32, 0).repeat_interleave(32, 1)).clamp(-448, 448).to(torch.float8_e4m3fn)
    expected = Fp8Dequantize(None)._dequantize_one(stored, scale, torch.float32)
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
    save("fp8_block", {"weight": stored, "weight_scale_inv": scale}, expected, config)
    blocks = torch.randint(0, 256, (2, 16, 2, 16), dtype=torch.uint8)
    scales = torch.randint(120, 130, (2, 16, 2), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    stored = {"gate_up_proj_blocks": blocks, "gate_up_proj_scales": scales}
    save("mxfp4_experts", stored, expected, {"quant_method": "mxfp4"})


def make_quark():
    """Quark quantizes whole models. `expected` is what its layer makes of each unit vector."""
    from quark.torch import ModelQuantizer, export_safetensors
    from quark.torch.quantization.config import config as specs
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": COLUMNS, "intermediate_size": COLUMNS, "head_dim": ROWS, "vocab_size": 64}
    counts = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    groups = specs.FP4PerGroupSpec(ch_axis=-1, group_size=16, is_dynamic=False, scale_format="float32")
    scales = specs.FP8E4M3PerTensorSpec(observer_method="min_max", is_dynamic=False)
    cases = {
        "quark_nvfp4": specs.ScaleQuantSpec(first_stage=groups, second_stage=scales),
        "quark_mxfp4": specs.OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False),
        "quark_fp8": specs.FP8E4M3PerTensorSpec(observer_method="min_max", is_dynamic=False),
        "quark_int8": specs.Int8PerChannelSpec(
            symmetric=False, scale_type="float", round_method="half_even", ch_axis=0, is_dynamic=False
        ),
    }
    for name, spec in cases.items():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**sizes, **counts)).eval()
        layer = specs.QLayerConfig(weight=spec.to_quantization_spec())
        quantizer = ModelQuantizer(specs.QConfig(global_quant_config=layer, exclude=["lm_head"]))
        model = quantizer.freeze(quantizer.quantize_model(model, [torch.arange(16)[None]]))
        with tempfile.TemporaryDirectory() as directory, torch.no_grad():
            export_safetensors(model, directory)
            config = json.loads((Path(directory) / "config.json").read_text())["quantization_config"]
            path = "model.layers.0.self_attn.q_proj"
            tensors = load_file(Path(directory) / "model.safetensors")
            stored = {key.removeprefix(f"{path}."): tensors[key] for key in tensors if key.startswith(path)}
            save(name, stored, model.get_submodule(path)(torch.eye(COLUMNS)).t(), config)


if __name__ == "__main__":
    for make in (make_compressed_tensors, make_transformers, make_awq, make_gptq, make_bitsandbytes, make_quark):
        make()
