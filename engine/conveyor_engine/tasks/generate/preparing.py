"""The kinds of bodies for models that generate text, each with the function that prepares it."""

from collections.abc import Mapping
from typing import Final

from conveyor_engine.serving.preparing.jobs import Kind
from conveyor_engine.serving.preparing.messages import prepare_count_tokens, prepare_messages
from conveyor_engine.serving.preparing.prepare import PreparedText, prepare_chat, prepare_completion
from conveyor_engine.serving.preparing.responses import prepare_response
from conveyor_engine.serving.preparing.tokens import TOKEN_KINDS, PreparedTokens

TASK: Final[Mapping[str, Kind]] = {
    **TOKEN_KINDS,
    "completion": Kind(prepare_completion, PreparedText),
    "chat": Kind(prepare_chat, PreparedText, runs_template=True),
    "messages": Kind(prepare_messages, PreparedText, runs_template=True),
    "count_tokens": Kind(prepare_count_tokens, PreparedTokens, runs_template=True),
    "responses": Kind(prepare_response, PreparedText, runs_template=True),
}
