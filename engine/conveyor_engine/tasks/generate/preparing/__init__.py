"""The kinds of bodies for models that generate text, each with the function that prepares it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from conveyor_engine.serving.preparing.costly_forms import has_form
from conveyor_engine.serving.preparing.jobs import BodyKind, Lane, ServedModel, always
from conveyor_engine.serving.preparing.pictures import build_kind
from conveyor_engine.serving.preparing.tokens import TOKEN_KINDS, PreparedTokens, prepare_tokenize
from conveyor_engine.tasks.generate.preparing.messages import prepare_count_tokens, prepare_messages
from conveyor_engine.tasks.generate.preparing.prepare import PreparedText, prepare_chat, prepare_completion
from conveyor_engine.tasks.generate.preparing.responses import prepare_response
from conveyor_engine.wire.worker import Job

_Prepare = Callable[[ServedModel, Job], Any]


def _build_kinds(name: str, prepare: _Prepare, prepared: Any, lane: Lane | None) -> Iterator[tuple[str, BodyKind]]:
    """Yield the kind of bodies with messages, and the kind of those that have images too."""
    is_costly = has_form if lane else always
    with_images = f"{name}_with_images"
    yield name, BodyKind(prepare, prepared, True, lane, is_costly, with_images=with_images)
    yield with_images, replace(build_kind(prepare, prepared), runs_template=True)


TASK: Final[Mapping[str, BodyKind]] = {
    **TOKEN_KINDS,
    "completion": BodyKind(prepare_completion, PreparedText, lane=Lane.FORMS, is_costly=has_form),
    **dict(_build_kinds("tokenize", prepare_tokenize, PreparedTokens, None)),
    **dict(_build_kinds("chat", prepare_chat, PreparedText, Lane.FORMS)),
    **dict(_build_kinds("messages", prepare_messages, PreparedText, Lane.FORMS)),
    **dict(_build_kinds("count_tokens", prepare_count_tokens, PreparedTokens, None)),
    **dict(_build_kinds("responses", prepare_response, PreparedText, Lane.FORMS)),
}
