"""Runs plans of a model that classifies images: computes logits from pixels with the model's own forward.

It implements the protocol `loop.executor` for one device. It keeps no state between steps. Worker processes have
prepared the pixels. Images of one shape are computed in one forward.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.errors import ModelError
from conveyor_engine.execution.build import Build
from conveyor_engine.execution.largest_step import measure_step
from conveyor_engine.execution.models import checks
from conveyor_engine.execution.models.classifier_files import describe_classifier
from conveyor_engine.execution.models.kinds import IMAGE_CLASSIFIER
from conveyor_engine.execution.placement import Placement
from conveyor_engine.execution.runners.base import Runner
from conveyor_engine.execution.start import Progress, RunnerStart
from conveyor_engine.execution.transfer import HostCopy, stack_pictures
from conveyor_engine.images.processor import SIDE_MAX, load_processor
from conveyor_engine.loop.executor import Executor
from conveyor_engine.wire.images import ImageFacts, PictureShape, read_pixels
from conveyor_engine.wire.step import StepPlan, StepResult

_MODEL_PIXELS_MAX: Final = SIDE_MAX**2  # of a processed image


class ImageClassifyRunner(Runner):
    """One image classifier on one device, ready to run after construction."""

    def __init__(self, config: EngineConfig, placement: Placement, progress: Progress) -> None:
        """Load the model. Raises ConfigError or ModelError."""
        start = RunnerStart(config, placement, progress, IMAGE_CLASSIFIER)
        self.device, self._dtype = start.device, start.dtype
        directory = Path(config.model)
        shape = load_processor(directory).find_shape()
        if shape.num_pixels > _MODEL_PIXELS_MAX:
            raise ModelError(
                f"its images become {shape.height} x {shape.width}; at most {_MODEL_PIXELS_MAX} pixels are supported"
            )
        described = describe_classifier(directory, start.model_config, classifies_tokens=False)
        self.model = start.load()
        self._try(shape)
        progress(
            f"event=model_loaded image={shape.channels}x{shape.height}x{shape.width} labels={len(described.labels)}"
        )
        self.facts = start.facts(
            self.model,
            max_model_len=_MODEL_PIXELS_MAX,
            attention_backend="model",
            max_num_batched_tokens=config.max_num_batched_tokens or start.max_num_seqs * shape.num_pixels,
            of_task=ImageFacts(labels=described.labels, activation=described.activation, shape=shape).encode(),
        )
        if self.device.type == "cuda":
            self._measure(shape, progress)

    def _try(self, shape: PictureShape) -> None:
        """Run the model once. Raises ModelError if it does not accept the output of its image processor."""
        pixels = torch.zeros((1, *shape), dtype=self._dtype, device=self.device)
        made = f"{shape.channels} x {shape.height} x {shape.width}"
        problem = f"the model does not take the {made} that its image processor makes"
        checks.run_once(problem, lambda: self._forward(pixels))

    def _measure(self, shape: PictureShape, progress: Progress) -> None:
        """Run the largest step. Raises ModelError if it does not fit into memory beside the weights."""
        number = max(1, min(self.facts.max_num_seqs, self.facts.max_num_batched_tokens // shape.num_pixels))
        pixels = torch.zeros((number, *shape), dtype=self._dtype, device=self.device)
        settings = "`max_num_seqs` or `max_num_batched_tokens`"
        step_bytes = measure_step(self.device, f"{number} images", settings, lambda: self._forward(pixels))
        progress(f"event=largest_step_fits mib={step_bytes / 2**20:.0f}")

    def begin(self, plan: StepPlan) -> Callable[[object], Callable[[], StepResult]]:
        """Begin a step, which computes the image that the plan has for each row. No row samples.

        On a GPU this only launches the work. Call the returned function, and then the function that it returns: the
        second call waits for the results.
        """
        brought = {row.row: row.payload for row in plan.admitted}
        groups: dict[PictureShape, list[tuple[int, memoryview]]] = {}
        for index, row in enumerate(plan.rows):
            shape, pixels = read_pixels(brought[row])
            groups.setdefault(shape, []).append((index, pixels))
        with torch.inference_mode():
            logits = [self._compute(shape, [pixels for _, pixels in group]) for shape, group in groups.items()]
            copy = HostCopy(*logits)

        def read() -> StepResult:
            payloads = [b""] * len(plan.rows)
            for group, computed in zip(groups.values(), copy.wait(), strict=True):
                for (index, _), row in zip(group, computed.numpy(), strict=True):
                    payloads[index] = row.tobytes() if np.isfinite(row).all() else b""
            return StepResult(plan.number, [], payloads=payloads)

        return lambda _: read

    def _compute(self, shape: PictureShape, pictures: Sequence[memoryview]) -> torch.Tensor:
        return self._forward(stack_pictures(pictures, shape, self.device, self._dtype))

    def _forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Compute logits, float32 (images, labels), from pixels (images, channels, height, width)."""
        logits: torch.Tensor = self.model(pixel_values=pixels).logits
        return logits.float()


TASK: Final[Build[Executor]] = ImageClassifyRunner
