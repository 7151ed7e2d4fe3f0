"""Writes `custom`, a program of torch.export, for the task Custom: a small network of fixed weights."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.export import Dim, export, save

from e2e.demo_model.bert import make_readable

FEATURES = 4
ITEMS_MAX = 1024


def train(directory: Path, progress: Callable[[str], None]) -> None:
    """Write model.pt2: `input` (batch, 4) -> `output` (batch, 3), whose rows sum to 1."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, 3), nn.Softmax(-1)).eval()
    program = export(model, (torch.zeros(2, FEATURES),), dynamic_shapes=({0: Dim("batch", max=ITEMS_MAX)},))
    save(program, directory / "model.pt2")
    make_readable(directory)
    progress(f"exported, {sum(weight.numel() for weight in model.parameters())} parameters")
