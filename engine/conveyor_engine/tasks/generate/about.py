"""Facts about the task that generates text, for all processes."""

from typing import Final

from conveyor_engine.registry import About
from conveyor_protocol.tasks import TASKS

TASK: Final = About(
    does="generates text",
    does_not="generates no text",
    recognises=lambda _: True,  # models that no other task recognises
    allows=TASKS["Generate"],
    runs_also=("embed",),
    reads=True,
)
