"""Schedules pictures. A picture takes one engine step for each timestep. The cost of a step is its number of pixels.

Pictures at different timesteps share a step. In mode `continuous` a picture can therefore join or leave the batch
between two denoising steps of the others. In the other modes it cannot.
"""

from typing import Final

from conveyor_engine.scheduling.outputs import Outputs
from conveyor_engine.scheduling.step import Step
from conveyor_engine.scheduling.tasks import OneStep, wrong_task
from conveyor_engine.tasks.imagegenerate.facts import GOES_ON, PaintRequest, build_params, read_facts
from conveyor_engine.wire.request import EngineRequest, ModelFacts
from conveyor_engine.wire.step import StepResult

_DUMMY_STEPS: Final = 2


class ImageGenerate(OneStep):
    """The task that generates pictures. They are never padded, so a batch costs the sum of its pictures' costs."""

    packs = True
    result_name = "pictures"
    not_finite = "the model's picture is not finite (NaN or infinity)"

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__(facts)
        self._paint_facts = read_facts(facts)

    def build_dummy(self, number: int, cost: int) -> EngineRequest:
        """Build a request for the largest picture of at most this cost, with guidance and two inference steps."""
        facts = self._paint_facts
        request = PaintRequest(
            size=facts.find_size(cost),
            num_inference_steps=_DUMMY_STEPS,
            guidance_scale=7.5,
            has_guidance=facts.guides,
            packed_tokens=facts.empty_tokens,
        )
        return EngineRequest(
            request_id=str(number),
            payload=request.encode(),
            params=build_params(number),
            payload_cost=request.cost,
            num_steps=facts.nums_forwards[_DUMMY_STEPS - 1],
            group=request.group,
        )

    def check(self, request: EngineRequest) -> None:
        """Raise InvalidRequest if the request has no seed."""
        if request.params is None or request.params.seed is None:
            raise wrong_task(self._task)

    def update(self, outputs: Outputs, step: Step, result: StepResult) -> None:
        """Add the results of a step. A picture that is not finite ends its request at once."""
        assert result.payloads is not None
        for work, payload in zip(step.work, result.payloads, strict=True):
            if not work.is_wanted:
                continue
            if work.num_logits or not payload:
                outputs.add_payload(work, payload, self.not_finite)
            else:
                outputs.add_progress(work, b"" if payload == GOES_ON else payload)


TASK: Final = ImageGenerate
