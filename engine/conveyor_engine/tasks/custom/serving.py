"""Serves custom models, on the paths of the Open Inference Protocol only."""

from typing import Final

from conveyor_engine.serving.http.task_paths import Inference, TaskPaths
from conveyor_engine.tasks.custom.facts import read_facts
from conveyor_engine.wire.tensors import decode_tensors

TASK: Final = TaskPaths(
    (),
    inputs_bytes_max=8 * 2**20,  # a gateway's default limit for a body
    inference=Inference(
        kind="tensors",
        read_signature=lambda facts: read_facts(facts).signature,
        read_outputs=lambda _, payload: decode_tensors(payload),
    ),
)
