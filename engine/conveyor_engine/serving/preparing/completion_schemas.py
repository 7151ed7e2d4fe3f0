"""The schema of /v1/completions. Used by `prepare`. Pure."""

from typing import Annotated, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from conveyor_engine.serving.preparing.fields import Place
from conveyor_engine.serving.preparing.schemas import SamplingFields
from conveyor_engine.serving.preparing.values import INTEGRAL, Alternatives, Prompts


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    place = Place.COMPLETIONS
    prompt_field = "prompt"

    prompt: Prompts
    """A text, token ids, or a list of either."""
    max_tokens: Annotated[int, Field(ge=0, lt=2**31), INTEGRAL] | None = None
    """Maximum number of tokens of the answer; default: 16. With `echo` it may be 0: the answer is the prompt alone."""
    logprobs: Alternatives | None = None
    """Return log probabilities of the answer's tokens, with this many alternatives for each."""

    echo: bool | None = False
    """True: the text begins with the prompt, and the log probabilities begin with those of the prompt's tokens."""

    @model_validator(mode="after")
    def _check_echo(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise PydanticCustomError("max_tokens", "max_tokens can only be 0 together with echo")
        return self

    def top_logprobs_wanted(self) -> int | None:
        """Return the number of alternatives for each token; None: the response has no log probabilities."""
        return self.logprobs

    @property
    def shows_prompt(self) -> bool:
        """Whether the answer begins with the prompt."""
        return bool(self.echo)

    def prompt_logprobs_wanted(self) -> int | None:
        """Return the number of alternatives for each prompt token.

        With `echo` and without `prompt_logprobs`, the number is the one for the answer's tokens.
        """
        return self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs
