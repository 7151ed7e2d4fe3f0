"""Runs moto's S3 and STS as a server on a port, which records its requests, for tests of `s3://`."""

import re
import ssl
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from botocore.session import Session
from moto import settings
from moto.moto_api._internal.models import moto_api_backend
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

BUCKET = "models"
URI = f"s3://{BUCKET}/teams/a/tiny"
NOTHING = (rb"(?!)", b"")
PART_BYTES = 5 << 20  # the smallest that S3 takes


class Server:
    """A WSGI application around moto's. It records requests and can change one response."""

    def __init__(self) -> None:
        self._moto = DomainDispatcherApplication(create_backend_app)
        self.requests: list[tuple[str, str, str | None]] = []
        self.corrupt = ""  # files whose name has this come with a wrong bit
        self.cut = ""  # the next answer to a range that begins so ends in its middle
        self.replaced = NOTHING  # a pattern, and what stands for it in every answer
        self.url = ""
        self.http: Any = None  # the server, while it runs

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        method, path, range = environ["REQUEST_METHOD"], environ["PATH_INFO"], environ.get("HTTP_RANGE")
        self.requests.append((method, path, range))
        answer = re.sub(*self.replaced, b"".join(self._moto(environ, self._without_length(start_response))))
        if range is not None and self.corrupt and self.corrupt in path:
            return [answer[:-1] + bytes([answer[-1] ^ 1])]
        if range is not None and self.cut and range.startswith(self.cut):
            self.cut = ""
            return [answer[: len(answer) // 2]]
        return [answer]

    def _without_length(self, start_response: Any) -> Any:
        """Remove the length from a response that is changed, because moto's is wrong for it."""

        def start(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
            kept = [(name, value) for name, value in headers if name.lower() != "content-length"]
            return start_response(status, kept, *more)

        return start_response if self.replaced == NOTHING else start

    def encrypt(self, context: ssl.SSLContext) -> None:
        """Serve TLS from now on."""
        self.http.socket = context.wrap_socket(self.http.socket, server_side=True)
        self.url = self.url.replace("http:", "https:")

    def client(self, service: str = "s3", key: str = "any", secret: str = "any") -> Any:
        return Session().create_client(
            service,
            region_name="us-east-1",
            endpoint_url=self.url,
            aws_access_key_id=key,
            aws_secret_access_key=secret,
        )

    def upload(self, folder: Path, prefix: str) -> None:
        """Upload a file as users' tools do, in parts if it is larger than one part."""
        s3 = self.client()
        for path in (path for path in folder.rglob("*") if path.is_file()):
            key = f"{prefix}/{path.relative_to(folder)}"
            content = path.read_bytes()
            if len(content) <= PART_BYTES:
                s3.put_object(Bucket=BUCKET, Key=key, Body=content)
            else:
                upload_parts(s3, key, [content[i : i + PART_BYTES] for i in range(0, len(content), PART_BYTES)])


def upload_parts(s3: Any, key: str, parts: list[bytes]) -> None:
    upload = {"Bucket": BUCKET, "Key": key, "UploadId": s3.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]}
    listed = [
        {"PartNumber": number, "ETag": s3.upload_part(**upload, PartNumber=number, Body=part)["ETag"]}
        for number, part in enumerate(parts, start=1)
    ]
    s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": listed})


class _Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        pass


@contextmanager
def running_server() -> Iterator[Server]:
    server = Server()
    http = make_server("127.0.0.1", 0, server, threaded=True, request_handler=_Quiet)
    server.url, server.http = f"http://127.0.0.1:{http.port}", http
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    server.client().create_bucket(Bucket=BUCKET)
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
        moto_api_backend.reset()


@dataclass
class User:
    """A user of an account on a server that checks access."""

    key: str = ""
    secret: str = field(default="", repr=False)


def make_user(server: Server, *actions: str) -> User:
    """Make a user that may do `actions` with all objects. Call it before `check_access`."""
    iam = server.client("iam")
    iam.create_user(UserName="team")
    if actions:
        statement = ",".join(f'"{action}"' for action in actions)
        policy = (
            f'{{"Version": "2012-10-17", "Statement": {{"Effect": "Allow", "Action": [{statement}], "Resource": "*"}}}}'
        )
        iam.put_user_policy(UserName="team", PolicyName="p", PolicyDocument=policy)
    made = iam.create_access_key(UserName="team")["AccessKey"]
    return User(made["AccessKeyId"], made["SecretAccessKey"])


def check_access(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server check signatures and policies from now on."""
    monkeypatch.setattr(settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0)


def set_keys(monkeypatch: pytest.MonkeyPatch, key: str, secret: str) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
