"""The smallest complete task of another package. Its model computes probabilities from numbers."""

from typing import Final

from conveyor_engine.registry import About

TASK: Final = About(
    does="makes probabilities",
    does_not="makes no probabilities",
    recognises=lambda directory: (directory / "softmax.json").is_file(),
    reads_text=False,
    cost_unit="numbers",
)
