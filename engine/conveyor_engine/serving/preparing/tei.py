"""The fields that all bodies of text-embeddings-inference (TEI) have, for tasks that serve its paths."""

from typing import Literal

from conveyor_engine.serving.preparing.schemas import ModelFields
from conveyor_engine.text.tokenizer import Truncation


class TeiFields(ModelFields):
    """The fields that say how texts are truncated."""

    truncate: bool | None = False
    """Whether to cut texts that are longer than the model's context. If false, they are rejected."""
    truncation_direction: Literal["Left", "Right", "left", "right"] | None = "Right"
    """The side on which texts are cut."""

    def truncation(self, room: int) -> Truncation | None:
        """Return how texts are truncated if each may have `room` tokens; None: they are not."""
        if not self.truncate:
            return None
        return Truncation(room, "left" if self.truncation_direction in ("Left", "left") else "right")


class TeiScoreFields(TeiFields):
    """The fields of bodies that request scores."""

    raw_scores: bool | None = False
    """True: return the model's logits instead of scores from 0 to 1."""
