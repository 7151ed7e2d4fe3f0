"""Checks images that chats name by URL, with their makers' clients, against an engine behind a proxy.

The proxy leads to a host on this machine, whose address the engine would refuse without a proxy.
"""

import base64
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import openai
import pytest
from tests.engine import image_host
from tests.engine.processes import EngineServer, wait_until
from tests.engine.seeing_models import make_image, save_seeing_model

MAX_TOKENS = 6
IMAGE = make_image(80, 60, 0)
FILE = io.BytesIO()
IMAGE.save(FILE, "PNG")
DATA = FILE.getvalue()
ENCODED = base64.b64encode(DATA).decode()
DATA_URL = f"data:image/png;base64,{ENCODED}"


class Seeing:
    """An engine that may fetch images, and the host that has some."""

    def __init__(self, server: EngineServer, host: image_host.ImageHost) -> None:
        self.server, self.host = server, host
        self.openai = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        self.anthropic = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)

    def chat(self, *urls: str) -> tuple[str | None, Any]:
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        content: Any = [{"type": "text", "text": "What is this?"}, *parts]
        answer = self.openai.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": content}], max_tokens=MAX_TOKENS, temperature=0
        )
        return answer.choices[0].message.content, answer.usage


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    folder = tmp_path_factory.mktemp("fetching")
    save_seeing_model("llava", folder / "tiny")
    image_host.ANSWERS["/image.png"] = image_host.OK + b"Content-Length: %d\r\n\r\n" % len(DATA) + DATA
    with (
        image_host.image_host(folder / "host") as host,
        image_host.proxy(host.port) as (proxy_port, _),
        pytest.MonkeyPatch.context() as environment,
    ):
        environment.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy_port}")
        environment.setenv("SSL_CERT_FILE", str(host.authority.certificate))
        hosts = f"{image_host.NAME}:{host.port}"
        with EngineServer(folder / "server", folder / "tiny", max_num_seqs=4, media_hosts=hosts) as server:
            seeing = Seeing(server.wait_ready(), host)
            with seeing.openai, seeing.anthropic:
                yield seeing


def test_a_fetched_image_gets_the_answer_of_the_same_data(seeing: Seeing) -> None:
    url = seeing.host.url("/image.png")
    expected, usage = seeing.chat(DATA_URL)
    assert seeing.chat(url) == (expected, usage)
    assert usage.prompt_tokens > 16
    assert seeing.chat(url, DATA_URL) == seeing.chat(DATA_URL, url) == seeing.chat(DATA_URL, DATA_URL)


def test_responses_and_messages_fetch_images(seeing: Seeing) -> None:
    url = seeing.host.url("/image.png")

    def respond(image: str) -> str:
        content: Any = [{"type": "input_image", "image_url": image}]
        answer = seeing.openai.responses.create(
            model="tiny", input=[{"role": "user", "content": content}], max_output_tokens=MAX_TOKENS, temperature=0
        )
        return answer.output_text

    def send(source: Any) -> tuple[str, int]:
        messages: Any = [{"role": "user", "content": [{"type": "image", "source": source}]}]
        answer = seeing.anthropic.messages.create(
            model="tiny", messages=messages, max_tokens=MAX_TOKENS, extra_body={"temperature": 0}
        )
        counted = seeing.anthropic.messages.count_tokens(model="tiny", messages=messages).input_tokens
        assert counted == answer.usage.input_tokens
        assert answer.content[0].type == "text"
        return answer.content[0].text, counted

    assert respond(url) == respond(DATA_URL)
    data = {"type": "base64", "media_type": "image/png", "data": ENCODED}
    assert send({"type": "url", "url": url}) == send(data)


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/missing", "image 1 of the messages cannot be fetched: images.example answers with status 404"),
        ("/image", "image 1 of the messages is not an image: send JPEG, PNG, WebP or GIF"),
        ("/endless", "sends too much: the images of a request may have 24 MiB together"),
        ("/moved-to-metadata", "image 1 of the messages redirects: it is a URL of 169.254.169.254, which"),
    ],
)
def test_a_bad_file_is_refused_by_name(seeing: Seeing, path: str, problem: str) -> None:
    good = seeing.host.url("/image.png")
    with pytest.raises(openai.BadRequestError, match=problem) as caught:
        seeing.chat(good, seeing.host.url(path))
    assert (caught.value.param or "").endswith("messages")
    seeing.chat(good)


def test_a_url_of_another_host_is_refused(seeing: Seeing) -> None:
    with pytest.raises(openai.BadRequestError, match=r"is a URL of 10\.0\.0\.1, which this server's setting"):
        seeing.chat("https://10.0.0.1/image.png")


def test_hosts_that_stall_delay_nobody_else(seeing: Seeing) -> None:
    """Their requests are more than the engine has workers."""
    with ThreadPoolExecutor(5) as clients:
        stalled = [clients.submit(seeing.chat, seeing.host.url(f"/stall?{number}")) for number in range(5)]
        wait_until(lambda: seeing.host.num_open == len(stalled), "all are fetched", seeing.server)
        seeing.chat(DATA_URL)
        seeing.chat(seeing.host.url("/image.png"))
        assert not any(each.done() for each in stalled)
        for each in stalled:
            with pytest.raises(openai.BadRequestError, match=r"did not arrive from images\.example within 10 s"):
                each.result()
