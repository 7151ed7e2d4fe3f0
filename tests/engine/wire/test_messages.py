import io
from array import array

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.builders import make_facts, make_request

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.errors import ErrorCode
from conveyor_engine.wire.frames import FrameReader, encode_frame, read_payloads
from conveyor_engine.wire.messages import (
    Abort,
    Add,
    Drain,
    Failed,
    FromEngine,
    Heartbeat,
    LoadingLine,
    LoadModel,
    Ready,
    Refused,
    StartFailed,
    StepOutputs,
    ToEngine,
    from_engine_decoder,
    to_engine_decoder,
)
from conveyor_engine.wire.pictures import PictureSpan
from conveyor_engine.wire.request import (
    EngineRequest,
    EngineStats,
    RequestOutput,
    SamplingParams,
    Thinking,
    TokenLogprobs,
)
from conveyor_engine.wire.worker import Part
from conveyor_protocol.failure_reasons import FailureReason

TO_ENGINE: list[ToEngine] = [
    LoadModel(EngineConfig(model="/m", kv_memory_fraction=0.5)),
    Add.of([make_request("é", 5, seed=2**64 - 1, logprobs=2, stop_token_ids=(1, 2)), make_request("b")]),
    Abort(["a"]),
    Drain(),
]
FROM_ENGINE: list[FromEngine] = [
    LoadingLine("event=x"),
    Ready(make_facts(), 0.5),
    StartFailed(FailureReason.NO_DEVICE, "none"),
    Refused(["a"], "full", overloaded=True, param=None, code=ErrorCode.QUEUE_FULL),
    Refused(["a"], "bad", overloaded=False, param="prompt", code=ErrorCode.INVALID_VALUE),
    StepOutputs(
        [RequestOutput(request_id="a", new_token_ids=[5], logprobs=[TokenLogprobs.of(5, -0.5, [5], [-0.5])])],
        EngineStats(num_running=1, batch_close_reasons={"full": 2}),
        3,
    ),
    Heartbeat(0.5),
    Failed(FailureReason.ENGINE_ERROR, "x"),
]


def test_no_field_of_a_request_is_lost_on_the_way() -> None:
    request = EngineRequest(
        request_id="a", party="b", prompt_token_ids=array("I", [1, 2]), payload=b"c", payload_cost=3, num_steps=2,
        group=4, params=SamplingParams(max_tokens=5), grammar="d", thinking=Thinking(1, 2, has_begun=True), level=6,
        deadline=7.0, arrival_time=8.0, cache_salt="e", adapter=9, pictures=(PictureSpan(0, 1, b"f"),),
        prediction=array("I", [3]),
    )  # fmt: skip
    given = {name: getattr(request, name) for name in request.__struct_fields__}
    default = EngineRequest(request_id="")
    same = {name for name, value in given.items() if value == getattr(default, name)}
    assert same == {"prompt_hashes"}, "every other field differs from its default"
    assert Add.of([request]).requests(8.0) == [request]


@pytest.mark.parametrize("message", TO_ENGINE + FROM_ENGINE, ids=lambda m: type(m).__name__)
def test_every_message_arrives_as_it_was_sent(message: msgspec.Struct) -> None:
    decoder = to_engine_decoder if message in TO_ENGINE else from_engine_decoder
    (payload,) = FrameReader().feed(encode_frame(message))
    assert decoder.decode(payload) == message


def test_a_prompt_travels_once_however_many_choices_it_has() -> None:
    def add(num_choices: int) -> tuple[Add, list[EngineRequest]]:
        requests = []
        for prompt in (array("I", range(1000)), array("I", range(1000))):
            requests += [
                make_request(f"{len(requests) + i}", prompt, arrival_time=7.0, seed=i, level=3, deadline=9.5)
                for i in range(num_choices)
            ]
        return Add.of(requests), requests

    message, sent = add(9)
    assert len(encode_frame(message)) < 1.5 * len(encode_frame(add(1)[0]))
    (payload,) = FrameReader().feed(encode_frame(message))
    received = to_engine_decoder.decode(payload)
    assert isinstance(received, Add)
    assert received.requests(7.0) == [msgspec.structs.replace(request, party="0") for request in sent], "one party"
    hashes = {id(request.prompt_hashes) for request in received.requests(7.0)}
    assert len(hashes) == 2, "choices of one prompt share its hashes, and nobody else does"


@settings(deadline=None)
@given(st.lists(st.integers(1, 300), max_size=40))
def test_frames_survive_any_cutting(cuts: list[int]) -> None:
    data = b"".join(encode_frame(message) for message in FROM_ENGINE)
    reader, payloads = FrameReader(), []
    for size in [*cuts, len(data)]:
        payloads += reader.feed(data[:size])
        data = data[size:]
    assert [from_engine_decoder.decode(payload) for payload in payloads] == FROM_ENGINE


@pytest.mark.parametrize("num_cut", [0, 1, 9])
def test_a_frame_that_the_end_of_the_stream_cuts_off_is_dropped(num_cut: int) -> None:
    data = encode_frame(Heartbeat(0.5)) + encode_frame(LoadingLine("event=x"))
    payloads = [from_engine_decoder.decode(p) for p in read_payloads(io.BytesIO(data[: len(data) - num_cut]))]
    assert payloads == [Heartbeat(0.5), LoadingLine("event=x")][: 1 if num_cut else 2]


def test_payloads_count_as_often_as_they_are_sent() -> None:
    """Choices of one prompt share its payload. Prompts with equal payloads do not."""
    prompt, payload = [1, 2], b"x" * 4000
    requests = [
        EngineRequest(request_id="a0", prompt_token_ids=prompt, payload=payload),
        EngineRequest(request_id="a1", prompt_token_ids=prompt, payload=payload),
        EngineRequest(request_id="b", prompt_token_ids=[1, 2], payload=bytes(payload)),
        EngineRequest(request_id="c", prompt_token_ids=[1, 2]),
    ]
    part = Part.of(requests, grammar_bytes=40)
    assert part.num_tokens_of == {"a0": 1012, "a1": 2, "b": 1002, "c": 2}
    assert 8000 < len(part.add) < 9000
