"""The kinds of bodies for models that generate text, each with the function that prepares it."""

from collections.abc import Callable, Mapping
from typing import Final

from conveyor_engine.serving.preparing.costly_forms import has_form
from conveyor_engine.serving.preparing.jobs import BodyKind, Lane, ServedModel
from conveyor_engine.serving.preparing.tokens import TOKEN_KINDS, PreparedTokens
from conveyor_engine.tasks.generate.preparing.messages import prepare_count_tokens, prepare_messages
from conveyor_engine.tasks.generate.preparing.prepare import PreparedText, prepare_chat, prepare_completion
from conveyor_engine.tasks.generate.preparing.responses import prepare_response
from conveyor_engine.wire.worker import Job


def _build_kind(prepare: Callable[[ServedModel, Job], PreparedText], *, runs_template: bool = True) -> BodyKind:
    return BodyKind(prepare, PreparedText, runs_template=runs_template, lane=Lane.FORMS, is_costly=has_form)


TASK: Final[Mapping[str, BodyKind]] = {
    **TOKEN_KINDS,
    "completion": _build_kind(prepare_completion, runs_template=False),
    "chat": _build_kind(prepare_chat),
    "messages": _build_kind(prepare_messages),
    "count_tokens": BodyKind(prepare_count_tokens, PreparedTokens, runs_template=True),
    "responses": _build_kind(prepare_response),
}
