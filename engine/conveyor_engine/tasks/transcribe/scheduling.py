"""Schedules windows of speech, whose transcripts are generated token by token.

A window is computed like a long prompt, but always in one step: first its sound, then the tokens with which its
transcript begins. The sound costs one token for each of its positions in the KV cache, silence included.
"""

from itertools import repeat
from typing import Final

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.scheduling.outputs import Outputs
from conveyor_engine.scheduling.step import Step
from conveyor_engine.scheduling.tasks import wrong_task
from conveyor_engine.tasks.transcribe.facts import AudioFacts, Window
from conveyor_engine.wire.request import EngineRequest, ModelFacts, SamplingParams
from conveyor_engine.wire.step import StepResult


class Transcribe:
    """The task that transcribes speech. Each row with logits gets a token, and in its first step also a payload."""

    whole_prompts = True
    packs = True
    result_name = "logits"

    def __init__(self, facts: ModelFacts) -> None:
        self._task, self._facts = facts.task, AudioFacts.read(facts)
        self.dummy_cost_max = self._facts.window_cost

    def build_dummy(self, number: int, cost: int) -> EngineRequest:
        """Build a request with a silent window and two output tokens. Its cost is fixed; `cost` has no effect."""
        return EngineRequest(
            request_id=str(number),
            prompt_token_ids=[self._facts.start],
            payload=Window(features=b"").encode(),
            payload_cost=self._facts.window_cost,
            params=SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.0),
        )

    def check(self, request: EngineRequest) -> None:
        """Raise InvalidRequest if the request has no window, or more tokens than the model's limit."""
        facts = self._facts
        if request.params is None or request.payload_cost != facts.window_cost:
            raise wrong_task(self._task)
        num_tokens, max_tokens = len(request.prompt_token_ids), request.params.max_tokens
        if num_tokens < 1 or max_tokens < 1 or num_tokens + max_tokens > facts.max_tokens:
            message = f"{num_tokens} prompt tokens and {max_tokens} output tokens do not fit into the model's"
            raise InvalidRequest(f"{message} {facts.max_tokens} tokens", param="prompt")

    def update(self, outputs: Outputs, step: Step, result: StepResult) -> None:
        """Add the tokens of a step, and the payloads of windows that began in it."""
        payloads = repeat(b"") if result.payloads is None else result.payloads
        sampled = zip(result.token_ids, result.logprobs or (), strict=True)
        for work, payload in zip(step.work, payloads, strict=False):
            (token_id,), logprobs = next(sampled) if work.num_logits else ((None,), None)
            if work.is_wanted:
                outputs.add_token(work, token_id, logprobs, payload or None)


TASK: Final = Transcribe
