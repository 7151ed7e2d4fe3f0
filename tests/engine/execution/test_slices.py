"""Checks that images which are encoded in slices beside steps give the tokens of `generate`, and delay no others."""

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.engine.execution.test_sight import QUICK, SeeingReference, add, answers, pytestmark  # noqa: F401
from tests.engine.references import run, tokens_of
from tests.engine.seeing_models import make_image

from conveyor_engine.loop.core import EngineCore
from conveyor_engine.tasks.generate.execution import slices
from conveyor_engine.tasks.generate.execution.sight import Sight
from conveyor_engine.wire.pictures import Picture, PictureSpan, PlacedPicture, encode_pictures
from conveyor_engine.wire.request import FinishReason
from conveyor_engine.wire.step import StepPlan, WantedPicture

GetSeeing = Callable[[str], SeeingReference]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> GetSeeing:
    made: dict[str, SeeingReference] = {}

    def get(kind: str) -> SeeingReference:
        return made.get(kind) or made.setdefault(kind, SeeingReference(kind, tmp_path_factory.mktemp(kind)))

    return get


@pytest.fixture
def _thin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each slice one function of torch, and encode nothing beside rows."""
    for name in ("SHARE", "FIRST_SHARE", "_ALONE_SECONDS"):
        monkeypatch.setattr(slices, name, 1e-9)


def find_encoders() -> set[threading.Thread]:
    """Return the threads that encode, of all encoders of this process."""
    return {thread for thread in threading.enumerate() if thread.name == "encoder"}


def is_encoding(seeing: SeeingReference) -> bool:
    assert seeing.runner._sliced is not None
    return seeing.runner._sliced._call is not None


@pytest.mark.usefixtures("_thin")
@pytest.mark.parametrize("kind", [QUICK[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in QUICK[1:])])
def test_images_encoded_in_the_thinnest_slices_give_the_tokens_of_generate(seeing: GetSeeing, kind: str) -> None:
    of_kind = seeing(kind)
    core = of_kind.make_core(max_num_batched_tokens=512)
    assert answers(core, of_kind.prompts) == of_kind.answers
    assert core.stats().num_steps > 100
    assert not is_encoding(of_kind)


def wait_for_encoder(core: EngineCore, seeing: SeeingReference) -> None:
    while not is_encoding(seeing):
        core.step(0.0)


def test_one_thread_encodes_all_images_and_ends_with_the_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    sight: Any = SlowSight()
    monkeypatch.setattr(slices, "perf_counter", lambda: sight.now)
    before = find_encoders()
    encoder = slices.SlicedEncoder(sight)
    for name in (b"one", b"two", b"three"):
        assert encoder.encode(make_plan(make_wanted(name)), 1000.0) == [name]
    (thread,) = find_encoders() - before
    del encoder
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.usefixtures("_thin")
def test_a_text_gets_its_tokens_while_an_image_is_encoded(seeing: GetSeeing) -> None:
    of_kind = seeing("qwen3_vl")
    core = of_kind.make_core()
    add(core, "image", of_kind.prompts[1])
    wait_for_encoder(core, of_kind)
    add(core, "text", of_kind.prompts[0])
    while "text" in core.scheduler.requests:
        assert not any(output.new_token_ids for output in core.step(0.0) if output.request_id == "image")
    assert is_encoding(of_kind)
    assert tokens_of(run(core)["image"]) == of_kind.answers[1]


@pytest.mark.usefixtures("_thin")
def test_an_aborted_request_ends_the_encoding_of_its_image(seeing: GetSeeing) -> None:
    of_kind = seeing("qwen3_vl")
    core = of_kind.make_core()
    add(core, "aborted", of_kind.prompts[1])
    wait_for_encoder(core, of_kind)
    core.abort("aborted")
    add(core, "other", of_kind.make_prompt([make_image(90, 90, 7)], 4))
    run(core)
    assert not is_encoding(of_kind)


@pytest.mark.usefixtures("_thin")
def test_an_aborted_request_ends_it_also_if_no_other_has_images(seeing: GetSeeing) -> None:
    of_kind = seeing("qwen3_vl")
    core = of_kind.make_core()
    add(core, "text", of_kind.prompts[0])
    add(core, "aborted", of_kind.prompts[1])
    wait_for_encoder(core, of_kind)
    core.abort("aborted")
    for _ in range(2):
        core.step(0.0)
    assert "text" in core.scheduler.requests
    assert not is_encoding(of_kind)


def test_an_image_whose_encoding_raises_ends_its_request_alone(
    seeing: GetSeeing, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_kind = seeing("qwen3_vl")
    core = of_kind.make_core()
    bad = of_kind.make_prompt([make_image(90, 90, 8)], 4)
    encode = Sight.encode

    def fail(sight: Sight, picture: Any) -> Any:
        if picture == bad[1][0].picture:
            raise RuntimeError("no such image")
        return encode(sight, picture)

    monkeypatch.setattr(Sight, "encode", fail)
    for number, prompt in enumerate((bad, *of_kind.prompts[:3])):
        add(core, str(number), prompt)
    outputs = run(core)
    assert outputs["0"][-1].finish_reason == FinishReason.ERROR
    assert [tokens_of(outputs[str(number)]) for number in (1, 2, 3)] == of_kind.answers[:3]


@pytest.mark.parametrize("ends", [FinishReason.LENGTH, FinishReason.ERROR])
def test_an_encoding_that_cannot_begin_holds_up_no_other_request(
    seeing: GetSeeing, monkeypatch: pytest.MonkeyPatch, ends: FinishReason
) -> None:
    """Without a thread, the step of the image encodes it. An image that cannot be read ends its request."""
    of_kind = seeing("qwen3_vl")
    core = of_kind.make_core()
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name == "encoder":
            raise RuntimeError("can't start new thread")
        start(thread)

    def lose(*_: Any) -> None:
        raise ValueError("no such image")

    if ends == FinishReason.LENGTH:
        assert of_kind.runner._sight is not None
        monkeypatch.setattr(of_kind.runner, "_sliced", slices.SlicedEncoder(of_kind.runner._sight))
        monkeypatch.setattr(threading.Thread, "start", fail)
    else:
        monkeypatch.setattr(slices, "decode_pictures", lose)
        monkeypatch.setattr(Sight, "encode", lose)
    add(core, "image", of_kind.prompts[1])
    add(core, "text", of_kind.prompts[0])
    outputs: dict[str, list[Any]] = {"image": [], "text": []}
    for _ in range(100):
        for output in core.step(0.0) if core.has_unfinished() else ():
            outputs[output.request_id].append(output)
    assert not core.has_unfinished()
    assert tokens_of(outputs["text"]) == of_kind.answers[0]
    assert outputs["image"][-1].finish_reason == ends


@pytest.mark.parametrize("kept_bytes", [1, 256 * 2**20])
def test_no_image_is_encoded_twice_because_too_many_wait_for_their_steps(
    seeing: GetSeeing, monkeypatch: pytest.MonkeyPatch, kept_bytes: int
) -> None:
    """The cache has room for one image, or for all. Steps compute an image in several chunks."""
    for name in ("SHARE", "FIRST_SHARE", "_ALONE_SECONDS"):
        monkeypatch.setattr(slices, name, 100.0)
    of_kind = seeing("qwen3_vl")
    core = of_kind.make_core(max_num_batched_tokens=8)
    assert of_kind.runner._sight is not None
    of_kind.runner._sight._kept_bytes = kept_bytes
    encoded: list[str] = []
    encode = Sight.encode

    def note(sight: Sight, picture: Any) -> Any:
        encoded.append(threading.current_thread().name)
        return encode(sight, picture)

    monkeypatch.setattr(Sight, "encode", note)
    for number in range(4):
        add(core, str(number), of_kind.make_prompt([make_image(120, 120, number)], 4))
    run(core)
    assert encoded == ["encoder"] * 4


class SlowSight:
    """Encodes with ten functions of torch, of a second each."""

    def __init__(self) -> None:
        self.now = 0.0
        self.kept: list[bytes] = []

    def encode(self, _: Any) -> Any:
        with torch.no_grad():
            for _ in range(10):
                self.now += 1.0
                torch.zeros(1)
        return ()

    def keep(self, digest: bytes, _: Any) -> None:
        self.kept.append(digest)

    def has_kept(self, digest: bytes) -> bool:
        return digest in self.kept

    def has_room(self, num_places: int, _: Any) -> bool:
        return num_places < 10


def make_plan(*wanted: WantedPicture, is_first: bool = False) -> StepPlan:
    return StepPlan(0, [], [], [0], [3], [1], [1], 1, wanted_pictures=list(wanted), images_first=is_first)


def make_wanted(digest: bytes) -> WantedPicture:
    return WantedPicture(digest, 1, encode_pictures([PlacedPicture(PictureSpan(0, 1, digest), Picture(1, {}))]))


def test_after_a_slice_that_took_longer_the_encoder_waits_until_its_share_has_grown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sight: Any = SlowSight()
    monkeypatch.setattr(slices, "perf_counter", lambda: sight.now)
    monkeypatch.setattr(slices, "SHARE", 0.25)
    encoder = slices.SlicedEncoder(sight)
    plan = make_plan(make_wanted(b"digest"))
    passed = []
    while not encoder.encode(plan, 1.0):
        passed.append(sight.now)
    assert passed[:9] == [1, 1, 1, 1, 2, 2, 2, 2, 3]
    assert sight.now == 10
    assert sight.kept == [b"digest"]


def test_an_image_is_encoded_after_another_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the given up encoding calls of torch on its way out, such as the end of `no_grad`, is no place to wait."""
    sight: Any = SlowSight()
    monkeypatch.setattr(slices, "perf_counter", lambda: sight.now)
    before, encoder = find_encoders(), slices.SlicedEncoder(sight)
    for number in range(3):
        assert encoder.encode(make_plan(make_wanted(b"aborted %d" % number)), 10.0) == []
    assert encoder.encode(make_plan(make_wanted(b"other")), 1000.0) == [b"other"]
    assert len(find_encoders() - before) == 1


def test_images_that_go_first_get_more_than_the_step_until_one_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    sight: Any = SlowSight()
    monkeypatch.setattr(slices, "perf_counter", lambda: sight.now)
    encoder = slices.SlicedEncoder(sight)
    plan = make_plan(make_wanted(b"one"), make_wanted(b"two"), is_first=True)
    passed = []
    for _ in range(6):
        encoder.encode(plan, 1.0)
        passed.append((sight.now, len(sight.kept)))
    assert passed == [(4, 0), (8, 0), (10, 1), (14, 1), (18, 1), (20, 2)]


def test_short_images_that_go_first_use_the_usual_share_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """If each of them ended a slice, fewer would be encoded than if they did not go first."""
    sight: Any = SlowSight()
    monkeypatch.setattr(slices, "perf_counter", lambda: sight.now)
    plan = make_plan(*map(make_wanted, (b"one", b"two", b"three")), is_first=True)
    assert len(slices.SlicedEncoder(sight).encode(plan, 30.0)) == 2, "18 s, and the image that was begun"
    assert sight.now == 20


def test_with_an_objective_for_tokens_images_that_go_first_get_no_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sight: Any = SlowSight()
    monkeypatch.setattr(slices, "perf_counter", lambda: sight.now)
    encoder = slices.SlicedEncoder(sight, has_goal=True)
    encoder.encode(make_plan(make_wanted(b"one"), make_wanted(b"two"), is_first=True), 5.0)
    assert sight.now == 2


def test_a_later_image_does_not_overtake_one_that_waits_for_room() -> None:
    sight: Any = SlowSight()
    large, small = (WantedPicture(name, size, b"") for name, size in ((b"large", 10), (b"small", 1)))
    encoder = slices.SlicedEncoder(sight)
    assert encoder.encode(make_plan(large, small), None) == []
    assert sight.now == 0
