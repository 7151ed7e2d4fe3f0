"""Serves /info, from which clients of text-embeddings-inference learn what the model does and its limits."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from conveyor_engine import __version__
from conveyor_engine.errors import ErrorCode, InvalidRequest
from conveyor_engine.serving.http.app_state import app_state, model_facts
from conveyor_engine.serving.http.task_paths import load_task_paths
from conveyor_engine.serving.preparing.pool import NUM_WORKERS
from conveyor_engine.wire.worker import INPUTS_MAX


class Info(msgspec.Struct):
    """The model and its limits, in the format of text-embeddings-inference 1.9.

    A text may have `max_input_length` tokens, a step `max_batch_tokens` tokens, and a request `max_client_batch_size`
    inputs. `model_type` has one key: `embedding`, `reranker` or `classifier`.
    """

    model_id: str
    model_sha: str | None
    model_dtype: str
    served_model_name: str
    model_type: dict[str, Any]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: None = None  # `sha` and `docker_label` describe TEI's build; some clients require both
    docker_label: None = None


async def get_info(request: Request) -> Response:
    """Respond to GET /info. Raises Unavailable, or InvalidRequest for a kind of model without this page."""
    state = app_state(request)
    facts, config = model_facts(state), state.config
    describe = load_task_paths()[facts.task].describe_for_tei
    if describe is None:
        raise InvalidRequest(
            "/info describes models that embed, rank or classify texts; /v1/models describes this one",
            code=ErrorCode.WRONG_TASK,
        )
    info = Info(
        model_id=state.model.name,
        model_sha=None,
        model_dtype=facts.dtype,
        served_model_name=state.model.name,
        model_type=describe(facts),
        max_concurrent_requests=facts.max_num_seqs + config.max_num_queued_requests,
        max_input_length=facts.max_model_len,
        max_batch_tokens=facts.max_num_batched_tokens,
        max_batch_requests=facts.max_num_seqs,
        max_client_batch_size=INPUTS_MAX,
        auto_truncate=False,
        tokenization_workers=NUM_WORKERS,
        version=__version__,
    )
    return Response(msgspec.json.encode(info), media_type="application/json")
