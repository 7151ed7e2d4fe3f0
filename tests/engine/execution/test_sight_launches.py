"""Counts the kernels that encoders of images would launch on a GPU, and how often they read numbers.

A read waits until the GPU has computed all before it. The models are narrow ones with the numbers of layers of real
ones, on a CPU: neither count depends on the width. docs/images-in-chats.md has the counts and what follows.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForImageTextToText, LlavaModel

from conveyor_engine.execution.models.towers import take_towers
from conveyor_engine.tasks.generate.execution.sight import Sight
from conveyor_engine.wire.pictures import Picture, PictureTensor

pytestmark = [
    pytest.mark.nightly,  # the counts are those of a version of transformers
    pytest.mark.skipif(
        "mm_encoder_outputs" not in inspect.signature(LlavaModel.forward).parameters,
        reason="models of this transformers take no encoded images",
    ),
]
aten = torch.ops.aten
NO_KERNEL = {
    *(aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten.empty_strided.default),
    *(aten._unsafe_view.default, aten.detach.default, torch.ops.prim.device.default),
}
TEXT = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 128, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
ROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}}
QWEN = {"hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 64}
SIGLIP = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 27}
# The encoder's layers, its image as the processor gives it, launches, and reads.
CASES = {
    "qwen2_5_vl": (
        {**QWEN, "depth": 32, "patch_size": 14, "fullatt_block_indexes": [7, 15, 23, 31]}, (16, 24), 14 * 14 * 6,
        1107 + 4 + 28 * 6, 101,  # one launch for each window of 8 x 8 patches, in 28 of the layers
    ),
    "qwen3_vl": ({**QWEN, "depth": 27, "patch_size": 16}, (16, 24), 16 * 16 * 6, 695, 84),
    "gemma3": ({**SIGLIP, "patch_size": 14, "image_size": 224}, None, 0, 353, 0),
}  # fmt: skip


class Launches(TorchDispatchMode):
    """The functions of torch that would launch a kernel, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func not in NO_KERNEL:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions that read numbers of tensors, in order."""
    found: list[str] = []

    def note(name: str, original: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        def read(tensor: torch.Tensor) -> Any:
            found.append(name)
            return original(tensor)

        return read

    for name in ("tolist", "item", "__int__", "__bool__"):
        monkeypatch.setattr(torch.Tensor, name, note(name, getattr(torch.Tensor, name)))
    return found


def make_picture(grid: tuple[int, int] | None, patch: int) -> Picture:
    """grid: patches of an image, (rows, columns); None: pixels (3, 224, 224). patch: numbers of each."""
    if grid is None:
        return Picture(16, {"pixel_values": pack(np.ones((1, 3, 224, 224), np.float32))})
    sizes = np.array([(1, *grid)], np.int64)
    pixels = np.ones((grid[0] * grid[1], patch), np.float32)
    return Picture(16, {"pixel_values": pack(pixels), "image_grid_thw": pack(sizes)})


def pack(array: Any) -> PictureTensor:
    return PictureTensor(array.dtype.name, array.shape, memoryview(array.tobytes()))


@pytest.mark.parametrize("kind", CASES)
def test_an_encoder_launches_so_many_kernels(kind: str, reads: list[str]) -> None:
    tower, grid, patch, num_launches, num_reads = CASES[kind]
    text = TEXT | ({} if kind == "gemma3" else ROPE) | ({"head_dim": 16} if kind == "qwen3_vl" else {})
    config = AutoConfig.for_model(kind, text_config=text, vision_config=tower)
    model = AutoModelForImageTextToText.from_config(config).eval()
    with torch.inference_mode():
        sight = Sight(model, take_towers(model), place_id=1)
        reads.clear()
        with Launches() as launches:
            sight.encode(make_picture(grid, patch))
    assert (len(launches.names), len(reads)) == (num_launches, num_reads)
