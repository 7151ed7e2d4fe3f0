"""The fields that bodies of text-embeddings-inference (TEI) share, for tasks that answer its paths."""

from typing import Literal

from conveyor_engine.serving.preparing.schemas import ModelFields
from conveyor_engine.text.tokenizer import Truncation


class TeiFields(ModelFields):
    """How texts are cut."""

    truncate: bool | None = False
    """Cut what is longer than the model's context; otherwise it is refused."""
    truncation_direction: Literal["Left", "Right", "left", "right"] | None = "Right"
    """Where it is cut."""

    def truncation(self, room: int) -> Truncation | None:
        """How texts are cut if each may have `room` tokens."""
        if not self.truncate:
            return None
        return Truncation(room, "left" if self.truncation_direction in ("Left", "left") else "right")


class TeiScoreFields(TeiFields):
    """Which scores are told, too."""

    raw_scores: bool | None = False
    """The model's logits, in place of scores from 0 to 1."""
