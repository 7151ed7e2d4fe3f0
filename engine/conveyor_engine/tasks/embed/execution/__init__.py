"""Loads a model that embeds."""

from pathlib import Path
from typing import Final

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.errors import ModelError
from conveyor_engine.execution.build import Build
from conveyor_engine.execution.models.kinds import DUAL_ENCODER, MASKED_LM, TEXT_ENCODER, find_kind
from conveyor_engine.execution.placement import Placement
from conveyor_engine.execution.start import Progress
from conveyor_engine.loop.executor import Executor
from conveyor_engine.model_files import SENTENCE_MODULES
from conveyor_engine.tasks.embed.execution.image_runner import DualRunner
from conveyor_engine.tasks.embed.execution.text_runner import PoolRunner
from conveyor_process.log import quote
from conveyor_protocol.failure_reasons import FailureReason


def _build(config: EngineConfig, placement: Placement, progress: Progress) -> Executor:
    kind = find_kind("embed", Path(config.model))
    if kind is DUAL_ENCODER:
        return DualRunner(config, placement, progress)
    assert kind is not None
    if kind is not MASKED_LM or (Path(config.model) / SENTENCE_MODULES).is_file():
        return PoolRunner(config, placement, progress, kind)
    try:
        return PoolRunner(config, placement, progress, kind)
    except ModelError as error:
        if error.reason is FailureReason.OUT_OF_MEMORY:
            raise
        # Only the class in config.json says that it makes sparse vectors. It embeds without its head too.
        progress(f"event=sparse_vectors_off reason={quote(str(error))}")
        return PoolRunner(config, placement, progress, TEXT_ENCODER)


TASK: Final[Build[Executor]] = _build
