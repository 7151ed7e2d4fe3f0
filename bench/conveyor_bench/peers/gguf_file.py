"""Writes a model's weights in llama.cpp's format. Used by the commands that measure llama.cpp."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.constants import MODEL_ARCH
from gguf.tensor_mapping import get_tensor_name_map
from transformers.convert_slow_tokenizer import bytes_to_unicode

NAME: Final = "weights.gguf"
_TYPES: Final = {"BF16": (np.uint8, GGMLQuantizationType.BF16), "F32": (np.float32, GGMLQuantizationType.F32)}


def write_gguf(model: Path) -> None:
    """Write the weights of Qwen3 in `model` beside them.

    Texts are token IDs. But node-llama-cpp reads texts when it loads a model, so each token has a name.
    """
    config = json.loads((model / "config.json").read_text())
    writer = GGUFWriter(model / NAME, "qwen3")
    _add_tokenizer(writer, config["vocab_size"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    names = get_tensor_name_map(MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    for file in model.glob("*.safetensors"):
        for name, tensor, kind in _read_tensors(file):
            found = names.get_name(name, try_suffixes=(".weight",))
            assert found is not None, name
            writer.add_tensor(found, tensor, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: GGUFWriter, vocab_size: int) -> None:
    names = [*bytes_to_unicode().values()][:vocab_size]
    names += [f"<{number}>" for number in range(len(names), vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(names)
    writer.add_token_types([TokenType.NORMAL] * vocab_size)
    writer.add_token_merges([f"{names[0]} {names[1]}"])  # llama.cpp needs one
    for add in (writer.add_eos_token_id, writer.add_bos_token_id, writer.add_pad_token_id):
        add(vocab_size - 1)


def _read_tensors(path: Path) -> Iterator[tuple[str, npt.NDArray[Any], GGMLQuantizationType]]:
    """Yield (name, tensor, type). Vectors become float32, as in files of llama.cpp's own converter."""
    data = np.memmap(path, np.uint8, "r")
    start = 8 + int(data[:8].view(np.uint64)[0])
    header = json.loads(data[8:start].tobytes())
    header.pop("__metadata__", None)
    for name, described in header.items():
        begin, end = described["data_offsets"]
        dtype, kind = _TYPES[described["dtype"]]
        tensor = data[start + begin : start + end].copy().view(dtype).reshape([*described["shape"][:-1], -1])
        if kind is GGMLQuantizationType.BF16 and tensor.ndim == 1:
            wide = tensor.view(np.uint16).astype(np.uint32) << 16
            tensor, kind = wide.view(np.float32), GGMLQuantizationType.F32
        yield name, tensor, kind
