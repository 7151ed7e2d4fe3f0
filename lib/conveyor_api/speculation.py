"""`spec.speculation`: drafts of the next tokens of answers."""

from typing import Annotated, Literal

from pydantic import Field

from conveyor_api.base import ApiModel

SpeculationMethod = Literal["NGram"]


class Speculation(ApiModel):
    """Drafts of the next tokens of answers, on CPUs. A step computes drafts only while they save time."""

    method: SpeculationMethod
    """NGram: what followed the last tokens earlier in the prompt or the answer."""
    max_tokens: Annotated[int, Field(ge=1, le=16)] = 8
    """Most drafts of one request in a step."""
