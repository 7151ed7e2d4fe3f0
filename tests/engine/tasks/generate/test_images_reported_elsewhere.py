"""Bug reports about images in chats that users of other servers filed, tried against a real engine process.

Each test names the reports. The model is a tiny Qwen2.5-VL: its positions have three axes, and images have few tokens.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import openai
import pytest
from PIL import Image, ImageDraw
from tests.engine.processes import EngineServer
from tests.engine.seeing_models import make_image, save_seeing_model
from tests.engine.tasks.generate.test_images_in_chats import as_url, encode

IMAGES = [make_image(112, 84, seed) for seed in range(6)]


class Seeing:
    """A served model and its clients."""

    def __init__(self, server: EngineServer) -> None:
        self.server = server
        self.openai = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        self.anthropic = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)

    def ask(self, *content: Any, salt: str = "", before: list[Any] | None = None, **options: Any) -> Any:
        """Send a user's message of texts and images, after others.

        salt: only requests with the same one share prefixes.
        """
        parts: list[Any] = [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image_url", "image_url": {"url": as_url(part) if isinstance(part, Image.Image) else part[0]}}
            for part in content
        ]
        return self.openai.chat.completions.create(
            **{"model": "tiny", "max_tokens": 4, "temperature": 0, "logprobs": True} | options,
            messages=[*(before or []), {"role": "user", "content": parts}],
            extra_body={"cache_salt": salt} if salt else {},
        )


def scores(answer: Any) -> list[tuple[str, float]]:
    return [(each.token, round(each.logprob, 3)) for each in answer.choices[0].logprobs.content]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    folder = tmp_path_factory.mktemp("reported")
    save_seeing_model("qwen2_5_vl", folder / "tiny")
    with EngineServer(folder / "server", folder / "tiny", max_num_seqs=8) as server:
        seeing = Seeing(server.wait_ready())
        with seeing.openai, seeing.anthropic:
            yield seeing


@pytest.mark.parametrize("size", [(26, 28), (332, 27), (27, 257), (798, 519), (1, 1), (3, 3), (1, 3), (3, 40), (1, 99)])
def test_images_smaller_than_a_patch_are_read(seeing: Seeing, size: tuple[int, int]) -> None:
    """vllm#15080, vllm#21109, vllm#8954, ollama#11297, mlx-engine#153: an error, or the end of the server."""
    assert seeing.ask("What is this?", make_image(*size, 0)).usage.prompt_tokens > 10


@pytest.mark.parametrize("kind", ["WEBP", "GIF", "JPEG"])
def test_the_bytes_decide_about_the_format(seeing: Seeing, kind: str) -> None:
    """cline#8977, ollama#17755, llama-cpp-python#1140: WebP failed. claude-code#13462: another format was named."""
    right = as_url(IMAGES[0], kind)
    wrong = right.replace(f"image/{kind.lower()}", "image/jpg", 1)
    assert scores(seeing.ask("a", [right])) == scores(seeing.ask("a", [wrong], salt="other"))


def test_an_image_after_a_cached_text_is_seen(seeing: Seeing) -> None:
    """fastllm#750: the prefix cache had the text, and the encoder was skipped."""
    text = "the quick brown fox jumps " * 10
    seeing.ask(text, salt="warm")
    cold = [seeing.ask(text, image, salt=f"cold {number}") for number, image in enumerate(IMAGES[:2])]
    warm = [seeing.ask(text, image, salt="warm") for image in IMAGES[:2]]
    assert [scores(each) for each in warm] == [scores(each) for each in cold]
    assert scores(warm[0]) != scores(warm[1])
    assert all(each.usage.prompt_tokens_details.cached_tokens for each in warm)


def test_one_text_with_many_images_at_once_has_each_image_s_answer(seeing: Seeing) -> None:
    """vllm#20261, vllm-mlx#718, ATOM#1358: the prefix cache took one image for another. vllm#43473: the end of the
    engine."""
    expected = [scores(seeing.ask("What is this?", image, salt="one by one")) for image in IMAGES]
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda image: scores(seeing.ask("What is this?", image)), IMAGES * 4))
    assert found == expected * 4
    assert len({str(each) for each in expected}) == len(IMAGES)


def test_the_image_of_a_later_turn_is_seen_and_the_first_one_is_cached(seeing: Seeing) -> None:
    """ollama#8844, ollama#9513, open-webui#6818: only the first image counted. sglang#11785: a second one in the
    conversation made the cache useless for the first."""
    first = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": as_url(IMAGES[0])}}]},
        {"role": "assistant", "content": "the quick brown fox"},
    ]
    answers = [seeing.ask("And this?", image, before=first, salt="turns") for image in IMAGES[1:3]]
    assert scores(answers[0]) != scores(answers[1])
    assert answers[1].usage.prompt_tokens_details.cached_tokens >= 16, "which end after the first image"


def test_an_answer_about_an_image_follows_a_schema(seeing: Seeing) -> None:
    """vllm#13038, vllm#12692: the schema was ignored for models of images and texts."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    answer = seeing.ask("What is this?", IMAGES[0], response_format=form, max_tokens=30)
    assert json.loads(answer.choices[0].message.content)["a"] in (1, 2)


def test_an_image_beside_tools_is_seen(seeing: Seeing) -> None:
    """lmstudio-bug-tracker#245: with tools, the image was left out."""
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    answers = [seeing.ask("Look.", image, tools=[tool], tool_choice="none") for image in IMAGES[:2]]
    assert scores(answers[0]) != scores(answers[1])


def test_a_tool_s_image_is_seen_as_coding_agents_send_it(seeing: Seeing) -> None:
    """llama.cpp#22536, litellm#25476, litellm#23712: the image was dropped, or became a text. claude-code#62296: an
    empty text beside an image was an error."""

    def send(image: Image.Image) -> Any:
        source = {"type": "base64", "media_type": "image/png", "data": encode(image)}
        kept = {"type": "ephemeral"}
        seen = [{"type": "image", "source": source, "cache_control": kept}]
        result = {"type": "tool_result", "tool_use_id": "a", "content": seen, "cache_control": kept}
        messages: Any = [
            {"role": "user", "content": [{"type": "text", "text": "Read a.png", "cache_control": kept}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "read", "input": {}}]},
            {"role": "user", "content": [result, {"type": "text", "text": ""}]},
        ]
        tools: Any = [{"name": "read", "input_schema": {"type": "object", "properties": {}}}]
        return seeing.anthropic.messages.create(
            model="tiny", messages=messages, tools=tools, tool_choice={"type": "none"}, max_tokens=12,
            extra_body={"temperature": 0},
        )  # fmt: skip

    answers = [send(image).content for image in IMAGES]
    assert len({str(answer) for answer in answers}) > 1


def test_a_transparent_image_is_seen_on_white(seeing: Seeing) -> None:
    """vllm#18508, hermes-agent#64548, Qwen3-VL#661: black text on a transparent ground became black on black, and
    hidden colours became noise."""
    plain, clear = Image.new("RGB", (84, 84), "white"), make_image(84, 84, 1).convert("RGBA")
    clear.putalpha(0)
    for image in (plain, clear):
        ImageDraw.Draw(image).rectangle((20, 20, 60, 40), "black")
    answers = [seeing.ask("a", [as_url(clear, kind, lossless=True)], salt=kind) for kind in ("PNG", "WEBP")]
    assert [scores(answer) for answer in answers] == [scores(seeing.ask("a", plain))] * 2


@pytest.mark.parametrize("route", ["chat/completions", "responses", "messages"])
def test_an_error_does_not_repeat_the_image(seeing: Seeing, route: str) -> None:
    """vllm#46631: errors of validation contained the whole base64."""
    image: Any = {"type": "image_url", "image_url": {"url": as_url(IMAGES[0]), "detail": 5}, "text": 7}
    messages = [{"role": "user", "content": [image, {"type": "input_image", "image_url": {"a": as_url(IMAGES[0])}}]}]
    body = {"model": "tiny", "max_tokens": 1, "input" if route == "responses" else "messages": messages}
    answer = seeing.server.client.post(f"{seeing.server.url}/v1/{route}", json=body)
    assert answer.status_code == 400
    assert len(answer.content) < 600


def test_many_images_one_after_another_leave_the_engine_as_it_was(seeing: Seeing) -> None:
    """vllm#28063, vllm#8369: the server ended after about ten requests."""
    expected = scores(seeing.ask("a", *IMAGES[:3], salt="first"))
    for number in range(30):
        seeing.ask("a", make_image(56 + number, 84, number), IMAGES[number % 3])
    assert scores(seeing.ask("a", *IMAGES[:3], salt="last")) == expected
