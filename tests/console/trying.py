"""Sends the form of the page for trying a service, as a browser does, and reads the changes that come back."""

import html
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html.parser import HTMLParser

import httpx
from tests.console.process import ConsoleProcess

Values = Sequence[tuple[str, str]]
File = tuple[str, bytes]


class _Fields(HTMLParser):
    """Collects the values that a browser sends for a form in which nothing has been changed."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[tuple[str, str]] = []
        self._area = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = {name: value or "" for name, value in attrs}
        if tag == "textarea":
            self._area = known["name"]
            self.values.append((self._area, ""))
        elif tag == "select" or (tag == "input" and known["type"] != "file"):
            self.values.append((known["name"], known.get("value", "")))

    def handle_data(self, data: str) -> None:
        if self._area:
            self.values[-1] = (self._area, self.values[-1][1] + data)

    def handle_endtag(self, tag: str) -> None:
        if tag == "textarea":
            self._area = ""


def read_fields(page: str) -> dict[str, str]:
    """Return the values with which the page's form works."""
    parser = _Fields()
    parser.feed(page)
    return dict(parser.values)


@contextmanager
def trying(
    console: ConsoleProcess, token: str, service: str, values: Values, file: File | None = None, **headers: str
) -> Iterator[httpx.Response]:
    """Yield the response to the form, whose body is not read."""
    parts: list[tuple[str, tuple[str | None, bytes]]] = [(name, (None, value.encode())) for name, value in values]
    if file is not None:
        parts.append(("file", file))
    sent = {"Authorization": f"Bearer {token}", **headers}
    with (
        httpx.Client(timeout=90, trust_env=False) as client,
        client.stream("POST", f"{console.url}/services/{service}/try", files=parts, headers=sent) as response,
    ):
        yield response


def _read_lines(response: httpx.Response) -> Iterator[str]:
    """Yield the lines of a stream. httpx would also split them at U+2028."""
    rest = b""
    for piece in response.iter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line.decode() for line in lines)


def read_changes(response: httpx.Response) -> Iterator[str]:
    """Yield each message of a stream, as HTML."""
    lines: list[str] = []
    for line in _read_lines(response):
        if line.startswith("data: "):
            lines.append(line.removeprefix("data: "))
        elif lines:
            yield "\n".join(lines)
            lines.clear()


def send(
    console: ConsoleProcess, token: str, service: str, values: Values, file: File | None = None, **headers: str
) -> str:
    """Return all changes."""
    with trying(console, token, service, values, file, **headers) as response:
        assert (response.status_code, response.headers["content-type"]) == (200, "text/event-stream")
        return "\n".join(read_changes(response))


def read_text(changes: str) -> str:
    """Return the text of a stream."""
    pieces = re.findall(r'<hx-partial hx-target="#text" hx-swap="beforeend">(.*?)</hx-partial>', changes, re.DOTALL)
    return html.unescape("".join(pieces))


def read_problem(changes: str) -> str:
    """Return why there is no answer; "" if there is one."""
    found = re.findall(r'<p id="state" role="alert" class="problem"[^>]*>(.*?)</p>', changes, re.DOTALL)
    return html.unescape(found[-1]) if found else ""


def read_receipt(changes: str) -> str:
    """Return the sentence about the time."""
    found = re.search(r"<h3>Where the time went</h3>\n<p>(.*?)</p>", changes, re.DOTALL)
    return html.unescape(found[1]) if found else ""


def read_curl(text: str) -> str:
    """Return the last command in a page or in changes."""
    *_, last = re.findall(r'<pre id="curl"[^>]*><code>(.*?)</code>', text, re.DOTALL)
    return html.unescape(last)
