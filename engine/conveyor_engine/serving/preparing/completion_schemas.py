"""The body of /v1/completions. Used by `prepare`. Pure."""

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
    """Log probabilities of the tokens and of this many alternatives."""

    echo: bool | None = False
    """True: the text begins with the prompt, and the log probabilities with those of its tokens."""

    def top_logprobs_wanted(self) -> int | None:
        """Alternatives per token; None = no log probabilities at all."""
        return self.logprobs

    @property
    def shows_prompt(self) -> bool:
        """Whether the answer begins with the prompt."""
        return bool(self.echo)

    def prompt_logprobs_wanted(self) -> int | None:
        """As many as for the answer, where the prompt is shown with it."""
        return self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs
