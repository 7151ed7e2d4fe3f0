"""What a worker makes of a body depends on the layout of the model."""

import io
import json
from typing import Any

import httpx
import pytest
from PIL import Image
from tests.engine.builders import make_facts
from tests.engine.paint_layouts import save_layout

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.serving.preparing.jobs import SamplingDefaults, ServedModel
from conveyor_engine.tasks.imagegenerate.facts import PaintFacts, PaintRequest, Size, read_request
from conveyor_engine.tasks.imagegenerate.preparing import find_size, prepare_edits, prepare_pictures
from conveyor_engine.tasks.imagegenerate.reading import PromptTokenizer, load_tokenizer
from conveyor_engine.wire.frames import FrameReader
from conveyor_engine.wire.messages import Add, to_engine_decoder
from conveyor_engine.wire.worker import Job


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    directory = tmp_path_factory.mktemp("flux")
    save_layout(directory, "flux")
    return load_tokenizer(directory)


def build_facts(reader: PromptTokenizer, guides: bool, side: int = 32) -> PaintFacts:
    return PaintFacts(
        size=Size(side, side),
        multiple=16,
        max_pixels=4 * side * side,
        max_side=2 * side,
        empty_tokens=reader.encode("")[0],
        nums_forwards=list(range(1, 501)),
        num_steps=28,
        guidance=3.5,
        guides=guides,
        strength=0.8,
        rounds_up=False,
    )


def prepare(reader: PromptTokenizer, guides: bool, **fields: Any) -> PaintRequest:
    facts = build_facts(reader, guides)
    job = Job(
        "pictures",
        make_facts(task="imagegenerate", max_num_batched_tokens=64 * 64, of_task=facts.encode()),
        1,
        0.0,
        json.dumps({"model": "tiny", "prompt": "a red circle"} | fields).encode(),
    )
    prepared = prepare_pictures(ServedModel("tiny", None, SamplingDefaults(), reader=reader), job)
    (frame,) = FrameReader().feed(prepared.parts[0].add)
    added = to_engine_decoder.decode(frame)
    assert isinstance(added, Add)
    return read_request(added.requests(0.0)[0].payload)


def test_defaults_are_those_of_the_layout(reader: PromptTokenizer) -> None:
    request = prepare(reader, guides=True)
    assert (request.num_inference_steps, request.guidance_scale, request.has_guidance) == (28, 3.5, True)
    assert [len(each) // 4 for each in request.packed_tokens] == [16, 512]
    assert request.packed_negative == []
    assert prepare(reader, guides=True, negative_prompt="").packed_negative == reader.encode("")[0]


def test_guidance_that_is_an_input_costs_nothing_and_knows_no_negative_prompt(reader: PromptTokenizer) -> None:
    assert prepare(reader, guides=True).cost == 2 * 32 * 32
    assert prepare(reader, guides=False, negative_prompt="").cost == 32 * 32
    assert prepare(reader, guides=False, size="64x64").cost == 64 * 64
    with pytest.raises(InvalidRequest, match="this model cannot be guided away from a prompt") as caught:
        prepare(reader, guides=False, negative_prompt="blue")
    assert caught.value.param == "negative_prompt"


@pytest.mark.parametrize(
    ("size", "guides", "sentence"),
    [
        ("40x32", False, "40x32 must have sides that are multiples of 16"),
        ("80x16", False, "allows 4096 pixels in all and 64 pixels for a side"),
        ("64x64", True, "allows 2048 pixels in all"),
    ],
)
def test_sizes_that_the_model_cannot_make_are_refused(
    reader: PromptTokenizer, size: str, guides: bool, sentence: str
) -> None:
    with pytest.raises(InvalidRequest, match=sentence) as caught:
        prepare(reader, guides, size=size)
    assert caught.value.param == "size"


@pytest.mark.parametrize("number", [1, 10])
def test_the_picture_to_edit_is_sent_once_however_many_are_made(reader: PromptTokenizer, number: int) -> None:
    file = io.BytesIO()
    Image.new("RGB", (1, 1)).save(file, "PNG")
    data = {"model": "tiny", "prompt": "a", "n": str(number), "size": "1024x1024", "seed": "5"}
    form = httpx.Request("POST", "http://a", data=data, files={"image": file.getvalue()})
    facts = make_facts(
        task="imagegenerate",
        max_num_seqs=2,
        max_num_batched_tokens=2048**2,
        of_task=build_facts(reader, False, 1024).encode(),
    )
    job = Job("edits", facts, 1, 0.0, form.read(), content_type=form.headers["Content-Type"])
    (part,) = prepare_edits(ServedModel("tiny", None, SamplingDefaults(), reader=reader), job).parts
    assert 3 << 20 < len(part.add) < (3 << 20) + 4000
    assert 3 << 20 <= 4 * sum(part.num_tokens_of.values()) < (3 << 20) + 4000
    (frame,) = FrameReader().feed(part.add)
    added = to_engine_decoder.decode(frame)
    assert isinstance(added, Add)
    requests = added.requests(0.0)
    assert [request.params and request.params.seed for request in requests] == list(range(5, 5 + number))
    assert len({id(request.payload) for request in requests}) == 1


def test_an_image_that_is_too_large_is_named_with_its_own_size(reader: PromptTokenizer) -> None:
    with pytest.raises(InvalidRequest, match="image of 100x17 pixels is too large"):
        find_size(build_facts(reader, False), None, 64 * 64, Image.new("RGB", (100, 17)))
