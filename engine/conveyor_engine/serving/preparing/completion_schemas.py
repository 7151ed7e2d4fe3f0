"""The schema of /v1/completions. Used by `prepare`. Pure."""

from conveyor_engine.serving.preparing.fields import Place
from conveyor_engine.serving.preparing.schemas import SamplingFields
from conveyor_engine.serving.preparing.values import Alternatives, Prompts


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    place = Place.COMPLETIONS
    prompt_field = "prompt"

    prompt: Prompts
    """A text, token ids, or a list of either."""
    logprobs: Alternatives | None = None
    """Return log probabilities of the answer's tokens, with this many alternatives for each."""

    echo: bool | None = False
    """True: the text begins with the prompt, and the log probabilities begin with those of the prompt's tokens."""

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
