"""Writes small programs of torch.export, and defines small classes, of each kind that the engine serves."""

import json
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim, export, save

from conveyor_engine.tasks.custom.model import Batch, Batching, Model, TensorSpec

LENGTH_MAX = 12


class Dense(torch.nn.Module):
    """Has two inputs of fixed shape, two named outputs, and weights of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(4, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.second = torch.nn.Linear(8, 3)
        self.scale = torch.tensor([2.0])

    def forward(self, features: torch.Tensor, kind: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.relu(self.norm(self.first(features))) + kind[:, None].to(features.dtype)
        return {"scores": self.second(hidden).softmax(-1) * self.scale, "best": self.second(hidden).argmax(-1)}


class Encoder(torch.nn.Module):
    """Takes padded sequences of different lengths, with a mask."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(16, 8)
        self.layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        self.head = torch.nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.layer(self.embedding(ids), src_key_padding_mask=~mask)
        weight = mask[..., None].to(hidden.dtype)
        return self.head((hidden * weight).sum(1) / weight.sum(1)), hidden


class Bag(torch.nn.Module):
    """Takes packed sequences of different lengths, with offsets. Returns a vector per sequence and a number per
    element."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(16, 4))

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        vectors = torch.nn.functional.embedding(ids, self.weight)
        sums = torch.nn.functional.pad(vectors.cumsum(0), (0, 0, 1, 0))
        return sums[offsets[1:]] - sums[offsets[:-1]], vectors.sum(-1)


class Conv(torch.nn.Module):
    """Takes images of different sizes, without padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = torch.nn.Conv2d(1, 2, 3, padding=1)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.conv(pixels.float() / 255).flatten(2).mean(-1)


def _dims(**most: int) -> dict[str, Any]:
    return {name: Dim(name, min=1, max=limit) for name, limit in most.items()}


def write_dense(folder: Path) -> torch.nn.Module:
    d = _dims(batch=64)
    example = (torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))
    return _write(folder, Dense(), example, ({0: d["batch"]}, {0: d["batch"]}))


def write_encoder(folder: Path, **settings: Any) -> torch.nn.Module:
    d = _dims(batch=64, length=LENGTH_MAX)
    example = (torch.zeros(2, 5, dtype=torch.int64), torch.ones(2, 5, dtype=torch.bool))
    shapes = ({0: d["batch"], 1: d["length"]}, {0: d["batch"], 1: d["length"]})
    settings = settings or {"ragged": "pad", "mask": "mask", "outputs": ["logits", "hidden"]}
    return _write(folder, Encoder(), example, shapes, **settings)


def write_bag(folder: Path) -> torch.nn.Module:
    d = _dims(total=64 * LENGTH_MAX) | {"ends": Dim("ends", min=3, max=65)}
    example = (torch.zeros(7, dtype=torch.int64), torch.tensor([0, 3, 7]))
    settings = {"ragged": "pack", "offsets": "offsets", "outputs": ["vector", "numbers"]}
    return _write(folder, Bag(), example, ({0: d["total"]}, {0: d["ends"]}), **settings)


def write_conv(folder: Path) -> torch.nn.Module:
    d = _dims(batch=64, height=8, width=8)
    example = (torch.zeros(2, 1, 5, 6, dtype=torch.uint8),)
    return _write(folder, Conv(), example, ({0: d["batch"], 2: d["height"], 3: d["width"]},))


def _write(folder: Path, module: torch.nn.Module, example: Any, shapes: Any, **settings: Any) -> torch.nn.Module:
    folder.mkdir(parents=True, exist_ok=True)
    module.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(export(module, example, dynamic_shapes=shapes), folder / "model.pt2")
    if settings:
        (folder / "model.json").write_text(json.dumps(settings))
    return module


WRITERS: dict[str, Callable[[Path], torch.nn.Module]] = {
    "dense": write_dense, "encoder": write_encoder, "bag": write_bag, "conv": write_conv,
}  # fmt: skip


class Words(Model):
    """A class that takes strings and numbers, and raises errors for some."""

    inputs = (TensorSpec("text", "BYTES", ()), TensorSpec("times", "INT64", (1,)))
    outputs = (TensorSpec("upper", "BYTES", ()), TensorSpec("length", "INT64", ()))

    def load(self, directory: Path, device: torch.device) -> None:
        self.suffix = (directory / "suffix").read_bytes()

    def run(self, batch: Batch) -> Batch:
        texts, times = batch["text"], batch["times"]
        assert isinstance(texts, list)
        assert isinstance(times, torch.Tensor)
        if any(text == b"bad" for (text,) in texts):
            raise ValueError("no bad words, please")
        upper = [[text.upper() * int(number) + self.suffix] for (text,), number in zip(texts, times[:, 0], strict=True)]
        return {"upper": upper, "length": torch.tensor([len(text) for (text,) in upper])}


class Mean(Model):
    """A class that takes padded numbers of different lengths, with their lengths."""

    inputs = (TensorSpec("numbers", "FP32", ("n",)),)
    outputs = (TensorSpec("mean", "FP32", ()), TensorSpec("centred", "FP32", ("n",)))
    lengths = {"n": (1, 100)}  # noqa: RUF012
    batching = Batching(ragged="pad", pad_values={"numbers": 7.0}, lengths="lengths")

    def run(self, batch: Batch) -> Batch:
        numbers, lengths = batch["numbers"], batch["lengths"]
        assert isinstance(numbers, torch.Tensor)
        assert isinstance(lengths, torch.Tensor)
        real = torch.arange(numbers.shape[1]) < lengths[:, None]
        assert (numbers[~real] == 7).all()
        mean = (numbers * real).sum(1) / lengths
        return {"mean": mean, "centred": numbers - mean[:, None]}


class Nothing:
    """A class that is not a model."""


def make_inputs(kind: str, rows: int, length: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(rows * 100 + length)
    match kind:
        case "dense":
            return {"features": torch.randn(rows, 4), "kind": torch.randint(0, 9, (rows,))}
        case "encoder":
            mask = torch.arange(length) < torch.randint(1, length + 1, (rows,))[:, None]
            return {"ids": torch.randint(0, 16, (rows, length)), "mask": mask}
        case "bag":
            offsets = torch.arange(rows + 1) * length
            return {"ids": torch.randint(0, 16, (rows * length,)), "offsets": offsets}
        case _:
            return {"pixels": torch.randint(0, 255, (rows, 1, length % 8 + 1, 3), dtype=torch.uint8)}


def rewrite(source: Path, target: Path, change: Callable[[str, bytes], bytes | None], **how: Any) -> None:
    """Copy the archive and apply `change` to each file."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", **how) as new:
        for entry in old.infolist():
            if (data := change(entry.filename, old.read(entry))) is not None:
                new.writestr(entry.filename, data)


def edit(name: str, change: Callable[[Any], None]) -> Callable[[str, bytes], bytes]:
    """Return a `change` that edits one JSON file."""

    def apply(path: str, data: bytes) -> bytes:
        if not path.endswith(name):
            return data
        content = json.loads(data)
        change(content)
        return json.dumps(content).encode()

    return apply
