"""The body of text-embeddings-inference (TEI) that asks for vectors. Pure."""

from typing import Annotated

from pydantic import Field

from conveyor_engine.serving.preparing.tei import TeiFields
from conveyor_engine.serving.preparing.values import INTEGRAL, Inputs


class EmbedRequest(TeiFields):
    """POST /embed."""

    inputs: Inputs
    """A text, token ids, or a list of either: each is embedded by itself. No text may be empty."""
    normalize: bool | None = True
    """Whether vectors have length 1."""
    prompt_name: str | None = None
    """Which of the model's instructions begins each text, such as `query`; default: the model's own default."""
    dimensions: Annotated[int, Field(ge=1, lt=2**31), INTEGRAL] | None = None
    """Only so many dimensions, the first ones, of a model that was trained for it."""
