"""httptools' parser for servers that know HTTP/1 only: a request to change the protocol is an ordinary request.

Used by `connection`. Java's HttpClient, for example, sends `Upgrade: h2c` with each request. A server that does not
know the protocol must ignore this header (RFC 9110, section 7.8), but httptools ends such a message before its body.
"""

from typing import Any, Protocol

import httptools

_OF_UPGRADES = (b"upgrade", b"connection", b"http2-settings")


class Receiver(Protocol):
    """What the parser reads of the connection that it reports to."""

    headers: list[tuple[bytes, bytes]]
    url: bytes


class HttpParser:
    """Parses a connection's requests. If a head asks for another protocol, it is parsed again without this wish."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._parser = _build(receiver)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    @property
    def will_parse_again(self) -> bool:
        """Whether the head that has just ended asks for another protocol. A CONNECT ends the parsing in any case."""
        return bool(self._parser.should_upgrade()) and any(name == b"upgrade" for name, _ in self._receiver.headers)

    def feed_data(self, data: bytes) -> None:
        """Parse more data. Raises HttpParserError, and HttpParserUpgrade after a CONNECT."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if not self.will_parse_again:
                raise
            head = self._write_head()
            self._parser = _build(self._receiver)
            self.feed_data(head + data[upgrade.args[0] :])

    def _write_head(self) -> bytes:
        version, method = self._parser.get_http_version().encode(), self._parser.get_method()
        kept = [(name, value) for name, value in self._receiver.headers if name not in _OF_UPGRADES]
        closes = any(name == b"connection" and b"close" in value.lower() for name, value in self._receiver.headers)
        kept += [(b"connection", b"close")] if closes else []
        lines = [b"%b %b HTTP/%b" % (method, self._receiver.url, version), *(b"%b: %b" % header for header in kept)]
        return b"\r\n".join([*lines, b"", b""])


def _build(receiver: Receiver) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(receiver)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn: answers precede what it then rejects
    return parser
