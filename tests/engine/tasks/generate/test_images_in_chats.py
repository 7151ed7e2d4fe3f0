"""Checks images in conversations of all three chat APIs, with their makers' clients, against a real engine process."""

import base64
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
import torch
from PIL import Image
from tests.engine.images.test_decoding import png, profile
from tests.engine.processes import EngineServer
from tests.engine.seeing_models import make_image, save_seeing_model
from transformers import AutoImageProcessor, AutoTokenizer, LlavaProcessor

from conveyor_engine.images.decoding import shrink
from e2e.cluster.paths import REPOSITORY

KIND = "llava"
MAX_TOKENS = 6
QUESTION = "What is this?"


def encode(image: Image.Image, kind: str = "PNG", **options: Any) -> str:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return base64.b64encode(file.getvalue()).decode()


def as_url(image: Image.Image, kind: str = "PNG", **options: Any) -> str:
    return f"data:image/{kind.lower()};base64,{encode(image, kind, **options)}"


IMAGES = [make_image(80, 60, seed) for seed in range(3)]


class Seeing:
    """A served model, and the answers of transformers' own processor and `generate`."""

    def __init__(self, server: EngineServer, directory: Path, model: Any) -> None:
        self.server, self.model = server, model
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        images = AutoImageProcessor.from_pretrained(directory, backend="pil")
        self.processor = LlavaProcessor(
            images, self.tokenizer, patch_size=14, vision_feature_select_strategy="default",
            num_additional_image_tokens=1, chat_template=self.tokenizer.chat_template,
        )  # fmt: skip
        self.openai = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        self.anthropic = anthropic.Anthropic(base_url=server.url, api_key="none")

    def expect(self, content: list[dict[str, Any]], images: list[Image.Image]) -> tuple[str, int]:
        """Return the answer to a user's message, and the number of the prompt's tokens."""
        text = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        inputs = self.processor(text=text, images=images, return_tensors="pt", add_special_tokens=False)
        with torch.inference_mode():
            tokens = self.model.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0)[0]
        number = inputs["input_ids"].shape[1]
        return self.tokenizer.decode(tokens[number:], skip_special_tokens=True), number


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    folder = tmp_path_factory.mktemp("seeing")
    model = save_seeing_model(KIND, folder / "tiny")
    with EngineServer(folder / "server", folder / "tiny", max_num_seqs=4) as server:
        seeing = Seeing(server.wait_ready(), folder / "tiny", model)
        with seeing.openai, seeing.anthropic:
            yield seeing


SHOWN = [
    {"type": "text", "text": QUESTION},
    {"type": "image"},
    {"type": "text", "text": "And this?"},
    {"type": "image"},
]


def chat(*images: str, question: str = QUESTION) -> list[Any]:
    urls = [{"type": "image_url", "image_url": {"url": url}} for url in images]
    texts = [{"type": "text", "text": text} for text in (question, "And this?")]
    return [{"role": "user", "content": [part for pair in zip(texts, urls, strict=False) for part in pair]}]


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_with_images_gets_the_answer_of_transformers(seeing: Seeing, stream: bool) -> None:
    text, number = seeing.expect(SHOWN, IMAGES[:2])
    options: dict[str, Any] = {"model": "tiny", "max_tokens": MAX_TOKENS, "temperature": 0}
    messages = chat(*map(as_url, IMAGES[:2]))
    if stream:
        events = seeing.openai.chat.completions.create(
            messages=messages, stream=True, stream_options={"include_usage": True}, **options
        )
        chunks = list(events)
        found = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        usage = chunks[-1].usage
    else:
        answer = seeing.openai.chat.completions.create(messages=messages, **options)
        found, usage = answer.choices[0].message.content or "", answer.usage
    assert usage is not None
    assert (found, usage.prompt_tokens) == (text, number)


def test_the_same_text_with_another_image_gets_another_answer(seeing: Seeing) -> None:
    """The first blocks of both prompts have the same tokens."""
    for image in (IMAGES[1], IMAGES[2], IMAGES[1]):
        expected, _ = seeing.expect(SHOWN, [image, IMAGES[0]])
        answer = seeing.openai.chat.completions.create(
            model="tiny", messages=chat(as_url(image), as_url(IMAGES[0])), max_tokens=MAX_TOKENS, temperature=0
        )
        assert answer.choices[0].message.content == expected


def test_a_response_to_images_is_the_same(seeing: Seeing) -> None:
    text, number = seeing.expect(SHOWN, IMAGES[:2])
    content: Any = [
        {"type": "input_text", "text": QUESTION},
        {"type": "input_image", "image_url": as_url(IMAGES[0]), "detail": "auto"},
        {"type": "input_text", "text": "And this?"},
        {"type": "input_image", "image_url": as_url(IMAGES[1])},
    ]
    answer = seeing.openai.responses.create(
        model="tiny", input=[{"role": "user", "content": content}], max_output_tokens=MAX_TOKENS, temperature=0
    )
    assert answer.usage is not None
    assert (answer.output_text, answer.usage.input_tokens) == (text, number)


def test_anthropic_s_client_sends_images_and_counts_their_tokens(seeing: Seeing) -> None:
    text, number = seeing.expect(SHOWN, IMAGES[:2])
    images = [{"type": "base64", "media_type": "image/png", "data": encode(image)} for image in IMAGES[:2]]
    content: Any = [
        {"type": "text", "text": QUESTION}, {"type": "image", "source": images[0]},
        {"type": "text", "text": "And this?"}, {"type": "image", "source": images[1]},
    ]  # fmt: skip
    messages: Any = [{"role": "user", "content": content}]
    answer = seeing.anthropic.messages.create(
        model="tiny", messages=messages, max_tokens=MAX_TOKENS, extra_body={"temperature": 0}
    )
    assert answer.content[0].type == "text"
    assert (answer.content[0].text, answer.usage.input_tokens) == (text, number)
    assert seeing.anthropic.messages.count_tokens(model="tiny", messages=messages).input_tokens == number


def test_the_page_s_request_is_answered(
    seeing: Seeing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs/images-in-chats.md").read_text(), re.DOTALL)
    IMAGES[0].save(tmp_path / "receipt.png")
    monkeypatch.chdir(tmp_path)
    own = block.replace("http://127.0.0.1:8000", seeing.server.url)
    exec(own.replace('model="qwen"', 'model="tiny", max_tokens=3'), found := {"__name__": "page"})
    found["client"].close()
    assert capsys.readouterr().out


def test_a_tool_s_result_may_be_an_image(seeing: Seeing) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": encode(IMAGES[0])}
    call = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": source}]}
    messages: Any = [
        {"role": "user", "content": "Look."}, {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]  # fmt: skip
    counted = seeing.anthropic.messages.count_tokens(model="tiny", messages=messages).input_tokens
    assert counted > 16  # the places of the image
    output: Any = [{"type": "input_image", "image_url": as_url(IMAGES[0])}]
    items: Any = [
        {"role": "user", "content": "Look."},
        {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": output},
    ]
    answer = seeing.openai.responses.create(model="tiny", input=items, max_output_tokens=1)
    assert answer.usage is not None
    assert answer.usage.input_tokens == counted


def test_tokenize_returns_the_tokens_of_images(seeing: Seeing) -> None:
    _, number = seeing.expect(SHOWN, IMAGES[:2])
    answer = seeing.server.post("/tokenize", {"messages": chat(*map(as_url, IMAGES[:2]))})
    assert answer.json()["count"] == number


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("data:image/png;base64,AAAA", "image 0 of the messages is not an image: send JPEG, PNG, WebP or GIF"),
        (as_url(IMAGES[0])[:-400], "image 0 of the messages is "),
        ("https://example.com/cat.png", "is a URL, and this server fetches none"),
        ("file:///etc/passwd", "is a URL, and this server fetches none"),
        ("data:image/svg+xml,<svg/>", "is a data: URI without base64"),
        ("data:image/svg+xml;base64," + base64.b64encode(b"<svg/>").decode(), "is not an image"),
        (as_url(Image.new("1", (60_000, 1))), "one side may be 100 times the other at most"),
        (as_url(Image.new("1", (6000, 6000))), "at most 16777216 are allowed"),
        ("", "is empty"),
    ],
)
def test_a_bad_image_is_refused_by_name(seeing: Seeing, url: str, problem: str) -> None:
    with pytest.raises(openai.BadRequestError, match=problem):
        seeing.openai.chat.completions.create(model="tiny", messages=chat(url), max_tokens=1)
    seeing.openai.chat.completions.create(model="tiny", messages=chat(as_url(IMAGES[0])), max_tokens=1)


@pytest.mark.parametrize(
    "image",
    [
        IMAGES[0].convert("CMYK"),
        IMAGES[0].convert("L"),
        make_image(4000, 4000, 0),
        make_image(1, 1, 0),
        make_image(400, 4, 0),
    ],
)
def test_images_of_any_kind_are_read(seeing: Seeing, image: Image.Image) -> None:
    answer = seeing.openai.chat.completions.create(model="tiny", messages=chat(as_url(image, "JPEG")), max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 16


def score(seeing: Seeing, messages: Any) -> list[tuple[str, float]]:
    """Return the tokens of an answer with their log probabilities."""
    answer = seeing.openai.chat.completions.create(
        model="tiny", messages=messages, max_tokens=3, temperature=0, logprobs=True
    )
    assert answer.choices[0].logprobs is not None
    return [(each.token, round(each.logprob, 4)) for each in answer.choices[0].logprobs.content or ()]


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


@pytest.mark.parametrize(
    ("url", "plain"),
    [
        (as_url(IMAGES[1], exif=turned(6)), IMAGES[1].transpose(Image.Transpose.ROTATE_270)),
        (as_url(IMAGES[1], exif=turned(2)), IMAGES[1].transpose(Image.Transpose.FLIP_LEFT_RIGHT)),
        (as_url(IMAGES[1], save_all=True, append_images=IMAGES[2:]), IMAGES[1]),
        (as_url(IMAGES[1], icc_profile=profile()), IMAGES[1]),
    ],
    ids=["turned", "mirrored", "animated", "with a profile"],
)
def test_metadata_turn_an_image_and_change_nothing_else(seeing: Seeing, url: str, plain: Image.Image) -> None:
    assert score(seeing, chat(url)) == score(seeing, chat(as_url(plain)))
    assert score(seeing, chat(as_url(plain))) != score(seeing, chat(as_url(IMAGES[2])))


def test_with_low_detail_a_small_version_is_read(seeing: Seeing) -> None:
    numbers = np.random.default_rng(0)
    large = Image.fromarray(numbers.integers(0, 256, (1000, 1000, 3), dtype=np.uint8))
    details: dict[str, Any] = {}
    for detail in ("low", "auto", "high"):
        messages = chat(as_url(large))
        messages[0]["content"][1]["image_url"]["detail"] = detail
        details[detail] = score(seeing, messages)
    assert details["low"] == score(seeing, chat(as_url(shrink(large, 2**18))))
    assert details["auto"] == details["high"] == score(seeing, chat(as_url(large))) != details["low"]


def test_bombs_in_chats_are_refused_one_by_one(seeing: Seeing) -> None:
    """Small files, whose headers promise gigabytes of pixels."""
    bomb = f"data:image/png;base64,{base64.b64encode(png(60_000, 60_000, rows=bytes(10_000_000))).decode()}"
    for urls in ([bomb], [as_url(IMAGES[0]), bomb], [bomb] * 64):
        parts: Any = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        problem = f"image {0 if urls[0] == bomb else 1} of the messages has 60000 x 60000 pixels"
        with pytest.raises(openai.BadRequestError, match=problem):
            seeing.openai.chat.completions.create(model="tiny", messages=[{"role": "user", "content": parts}])
    seeing.openai.chat.completions.create(model="tiny", messages=chat(as_url(IMAGES[0])), max_tokens=1)


def test_a_text_with_the_image_s_token_is_refused_beside_images_only(seeing: Seeing) -> None:
    in_call = {"type": "function", "id": "a", "function": {"name": "f", "arguments": '{"a": "<image>"}'}}
    in_parts = [{"type": "text", "text": text} for text in ("<ima", "ge>")]
    for messages in (
        chat(as_url(IMAGES[0]), question="<image>"),
        [{"role": "user", "content": [*chat(as_url(IMAGES[0]))[0]["content"], *in_parts]}],
        [*chat(as_url(IMAGES[0])), {"role": "assistant", "tool_calls": [in_call]}],
    ):
        with pytest.raises(openai.BadRequestError, match="no text may contain '<image>'"):
            seeing.openai.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
    seeing.openai.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "<image>"}], max_tokens=1)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        (chat(as_url(IMAGES[0])) * 65, "the messages have 65 images; at most 64 are allowed"),
        (chat(as_url(IMAGES[0])) * 1000, "the messages have 1000 images; at most 64 are allowed"),
        ([{"role": "assistant", "content": chat(as_url(IMAGES[0]))[0]["content"]}], "an assistant's message has no"),
        *(
            ([{"role": "user", "content": [{"type": kind}]}], "takes parts of type 'text' and 'image_url' only")
            for kind in ("input_audio", "audio_url", "video_url", "video", "file")
        ),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "must have a string `url`"),
    ],
)
def test_content_that_no_model_reads_is_refused(seeing: Seeing, messages: Any, problem: str) -> None:
    with pytest.raises(openai.BadRequestError, match=problem):
        seeing.openai.chat.completions.create(model="tiny", messages=messages, max_tokens=1)


def test_a_prompt_with_images_that_does_not_fit_is_refused(seeing: Seeing) -> None:
    for count, problem in (
        (20, "maximum context length is 512 tokens"),
        (60, r"images have 5\d\d tokens, and the con"),
    ):
        with pytest.raises(openai.BadRequestError, match=problem):
            seeing.openai.chat.completions.create(model="tiny", messages=chat(as_url(IMAGES[0])) * count, max_tokens=1)


def test_choices_share_a_prompt_s_images(seeing: Seeing) -> None:
    """The memory of an image counts once: 128 times an image of two megapixels would exceed the limit."""
    large = make_image(1400, 1400, 1)
    answer = seeing.openai.chat.completions.create(
        model="tiny", messages=chat(*[as_url(large)] * 2), max_tokens=2, n=128, temperature=0
    )
    assert len({choice.message.content for choice in answer.choices}) == 1
    assert seeing.openai.chat.completions.create(model="tiny", messages=chat(as_url(IMAGES[0])), max_tokens=1)


def test_a_prompt_with_images_is_not_truncated(seeing: Seeing) -> None:
    with pytest.raises(openai.BadRequestError, match="a prompt with images cannot be truncated"):
        seeing.openai.chat.completions.create(
            model="tiny", messages=chat(as_url(IMAGES[0])), max_tokens=1, extra_body={"truncate_prompt_tokens": 9}
        )


def test_an_engine_whose_model_reads_no_images_says_so(server: EngineServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    with client, pytest.raises(openai.BadRequestError, match="this engine's model reads no images"):
        client.chat.completions.create(model="tiny", messages=chat(as_url(IMAGES[0])), max_tokens=1)
