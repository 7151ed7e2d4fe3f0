"""`spec.workload`: how long the requests of a service are."""

from typing import Annotated, ClassVar, Final

from pydantic import Field

from conveyor_api.base import ApiModel, Rule
from conveyor_protocol import workload

_Tokens = Annotated[int, Field(ge=1, le=16_777_216)]


class TokenLengths(ApiModel):
    """Two percentiles of a length in tokens."""

    rules: ClassVar = (
        Rule(
            "self.p50 <= self.p95",
            "p50 must not be more than p95",
            lambda lengths: lengths.p50 <= lengths.p95,
            field="p50",
        ),
    )

    p50: _Tokens
    """Median, in tokens."""
    p95: _Tokens
    """95th percentile, in tokens."""


class Workload(ApiModel):
    """Lengths of the requests. Engines derive sizes from them when they start; `status.effective.derived` shows the
    sizes. Fields that set a size take precedence."""

    input_tokens: TokenLengths
    """Tokens of a prompt, or of a text to embed, rank or classify."""
    output_tokens: TokenLengths | None = None
    """Tokens of an answer; only for models that generate, which require it."""

    @property
    def long_tokens(self) -> int:
        """Return the tokens of a request whose prompt and answer have their P95 lengths."""
        return self.lengths.long_tokens

    @property
    def lengths(self) -> workload.Workload:
        """Return the lengths in the form that all programs share."""
        outputs = self.output_tokens
        return workload.Workload(
            workload.Lengths(self.input_tokens.p50, self.input_tokens.p95),
            None if outputs is None else workload.Lengths(outputs.p50, outputs.p95),
        )


P95_SUM_CEL: Final = (
    "(self{at}.workload.inputTokens.p95"
    " + (has(self{at}.workload.outputTokens) ? self{at}.workload.outputTokens.p95 : 0))"
)
"""A CEL expression with the value of `Workload.long_tokens`. `at` is the path of the spec in `self`."""
