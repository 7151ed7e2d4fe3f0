"""The bodies that ask for text."""

from collections.abc import Mapping
from typing import Final

from conveyor_engine.serving.preparing.jobs import Kind
from conveyor_engine.serving.preparing.prepare import PreparedText, prepare_chat, prepare_completion

TASK: Final[Mapping[str, Kind]] = {
    "completion": Kind(prepare_completion, PreparedText),
    "chat": Kind(prepare_chat, PreparedText, runs_template=True),
}
