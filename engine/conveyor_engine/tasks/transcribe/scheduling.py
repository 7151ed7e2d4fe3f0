"""Scheduling of windows of speech. A window costs its seconds, whether they have sound or not."""

from typing import Final

from conveyor_engine.scheduling.tasks import OneStep
from conveyor_engine.wire.audio import AudioFacts, Window
from conveyor_engine.wire.request import EngineRequest, ModelFacts

_WARM_UP_SHARE: Final = 4  # dummies have a quarter of the longest transcript: steps of five times that are no fault


class Transcribe(OneStep):
    """The task that transcribes speech. Windows have one length, so costs add up."""

    packs = True
    result_name = "transcripts"
    not_finite = "the model's probabilities are not finite (NaN or infinity)"

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__(facts)
        self._facts = AudioFacts.read(facts)

    def build_dummy(self, number: int, cost: int) -> EngineRequest:
        """Build a request with a window of one sound. Its cost is fixed; `cost` has no effect."""
        window = Window(
            tokens=[self._facts.start],
            features=b"",
            language_at=None,
            max_new_tokens=max(1, self._facts.max_tokens // _WARM_UP_SHARE),
            never_ends=True,
        )
        seconds = self._facts.window_seconds
        return EngineRequest(request_id=str(number), payload=window.encode(), payload_cost=seconds)


TASK: Final = Transcribe
