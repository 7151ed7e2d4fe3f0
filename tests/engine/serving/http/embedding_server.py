"""A server with a tiny model that embeds, and the vectors of transformers, for tests of its routes."""

from pathlib import Path
from typing import Any

import torch
from tests.engine.encoders import FILES, embed, write_served_encoder
from tests.engine.processes import EngineServer
from tokenizers import Tokenizer

# Batches of two that wait for ever, and two more places.
WAITING: dict[str, Any] = {
    "batching_mode": "static",
    "max_num_seqs": 2,
    "batching_window_seconds": 3600,
    "max_num_queued_requests": 2,
}


class Served:
    """A server with a tiny model that embeds, and transformers' vectors."""

    def __init__(self, kind: str, folder: Path, **fields: object) -> None:
        self.kind, self.directory = kind, folder / "tiny"
        self.model = write_served_encoder(kind, self.directory, matryoshka_dimensions=[8, 16])
        self.tokenizer = Tokenizer.from_file(str(self.directory / "tokenizer.json"))
        self.server = EngineServer(folder / "server", self.directory, **fields)

    def token_ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def expect(self, token_ids: list[int], dimensions: int | None = None) -> torch.Tensor:
        mode, normalizes = FILES[self.kind]
        return embed(self.model, token_ids, mode, normalizes=normalizes, dimensions=dimensions)


def distance(vector: list[float], expected: torch.Tensor) -> float:
    return float((torch.tensor(vector) - expected).abs().max())
