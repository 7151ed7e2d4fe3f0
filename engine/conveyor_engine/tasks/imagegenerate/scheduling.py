"""Scheduling of pictures: each takes as many steps as its scheduler has timesteps, and each step costs its pixels.

In a step, pictures at any timestep share the budget. So `batching_mode: continuous` lets a picture join and leave
between two denoising steps of the others, and the other modes do not.
"""

from typing import Final

from conveyor_engine.scheduling.outputs import Outputs
from conveyor_engine.scheduling.step import Step
from conveyor_engine.scheduling.tasks import OneStep
from conveyor_engine.tasks.imagegenerate.facts import GOES_ON, PaintRequest, read_facts
from conveyor_engine.wire.request import EngineRequest, ModelFacts
from conveyor_engine.wire.step import StepResult

_DUMMY_STEPS: Final = 2


class ImageGenerate(OneStep):
    """The task that makes pictures. Those of one size share a forward without padding, so costs add up."""

    packs = True
    result_name = "pictures"
    not_finite = "the model's picture is not finite (NaN or infinity)"

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__(facts)
        self._paint_facts = read_facts(facts)

    def build_dummy(self, number: int, cost: int) -> EngineRequest:
        """Build a request for a picture with guidance, the largest of at most this cost, in two inference steps."""
        facts = self._paint_facts
        request = PaintRequest(
            size=facts.find_size(cost),
            num_inference_steps=_DUMMY_STEPS,
            guidance_scale=7.5,
            seed=number,
            packed_tokens=facts.empty_tokens,
            packed_negative=facts.empty_tokens,
        )
        return EngineRequest(
            request_id=str(number),
            payload=request.encode(),
            payload_cost=request.cost,
            num_steps=facts.nums_forwards[_DUMMY_STEPS - 1],
            group=request.group,
        )

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
