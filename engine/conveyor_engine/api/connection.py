"""One client's connection: uvicorn's, with a limit for request line and headers. Used by `server`."""

from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from conveyor_engine.api.failures import error_body

HEAD_BYTES_MAX = 64 * 2**10  # request line and headers


class Connection(HttpToolsProtocol):
    """What is too long, or no HTTP, is answered in OpenAI's form, and the connection ends."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._in_head = True
        self._num_bytes = 0  # since the end of the last request
        self._too_long = False

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._num_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
            self._too_long = True
            self.send_400_response("")

    def on_headers_complete(self) -> None:
        self._too_long = len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > HEAD_BYTES_MAX
        if self._too_long:
            raise ValueError  # stops the parser; uvicorn then calls send_400_response
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head, self._num_bytes = True, 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        status, code = HTTPStatus.BAD_REQUEST, "malformed_http"
        if self._too_long:
            status, code = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "headers_too_large"
            msg = f"request line and headers may have {HEAD_BYTES_MAX} bytes together"
        body = error_body(msg, "invalid_request_error", code)
        head = f"HTTP/1.1 {status:d} {status.phrase}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        self.transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()
