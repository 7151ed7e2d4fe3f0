"""Facts about the task that generates text, for all processes."""

from typing import Final

from conveyor_engine.registry import About

TASK: Final = About(
    does="generates text",
    does_not="generates no text",
    recognises=lambda _: True,  # models that no other task recognises
    batching_mode="continuous",
    divides=True,
    has_adapters=True,
    runs_also=("embed",),
)
