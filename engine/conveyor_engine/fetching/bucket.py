"""Lists and reads the files of a prefix in a bucket with an S3 API, through botocore. Used by `fetch`.

AWS_ENDPOINT_URL, AWS_REGION, AWS_CA_BUNDLE and the variables for credentials have the same meaning as in botocore.
Without AWS_CA_BUNDLE, SSL_CERT_FILE names the trusted authorities, as for the other downloads.
botocore also assumes a role with the token of a ServiceAccount (AWS_ROLE_ARN, AWS_WEB_IDENTITY_TOKEN_FILE).

The only digest that a bucket provides is the ETag. For a file that was uploaded in one piece it is the MD5 of the
bytes. For a file in parts it is the MD5 of the parts' MD5s, so this module also requests the size of the parts. For
files that are encrypted with a key of KMS or of the client, the ETag is no digest of the bytes
(docs.aws.amazon.com/AmazonS3/latest/API/API_Object.html). Every read requires the same ETag, so all bytes are from one
version.
"""

import hashlib
import json
import logging
import os
import re
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, NoCredentialsError
from botocore.session import Session
from urllib3.exceptions import HTTPError

from conveyor_engine.errors import ModelError
from conveyor_engine.fetching.bounds import MAX_ANSWER_BYTES, MAX_FILES, failed, limit_chunks
from conveyor_engine.fetching.source import (
    MODULE_FOLDERS,
    ProgressFile,
    RemoteFile,
    RemoteModel,
    find_present,
    keep_known,
)
from conveyor_engine.model_files import PIPELINE_FOLDERS, PIPELINE_INDEX
from conveyor_process.log import without_secrets
from conveyor_process.proxies import bypasses_proxy
from conveyor_protocol.failure_reasons import FailureReason

BLOCK_BYTES = 16 << 20  # per read; must be below MAX_ANSWER_BYTES; each connection holds one in memory
CONNECTIONS = 8
_CHUNK_BYTES = 256 << 10
_DEFAULT_REGION = "us-east-1"  # S3 redirects from it to the right region, and other servers have no regions
_MD5 = re.compile(r"[0-9a-f]{32}")
_MD5_OF_PARTS = re.compile(r"[0-9a-f]{32}-([1-9][0-9]{0,4})")
_ETAG = re.compile(r"[A-Za-z0-9-]{1,128}")
_KEY_ERRORS = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken")
_log = logging.getLogger(__name__)


class Bucket:
    """One prefix of one bucket."""

    def __init__(self, bucket: str, prefix: str) -> None:
        self._bucket, self._prefix = bucket, prefix
        self._uri = f"s3://{bucket}/{prefix}"
        self._endpoint = "S3"
        with self._errors_explained():
            self._client = _connect()
        self._endpoint = without_secrets(self._client.meta.endpoint_url)
        endpoint = self._client._endpoint  # botocore offers no other access to what it receives
        endpoint.http_session = _LimitedSession(endpoint.http_session, self._endpoint)

    def describe(self, commit: str | None = None) -> RemoteModel:
        """List the files of the prefix. `commit` is a hash of names, sizes and ETags. Raises ModelError."""
        with self._errors_explained(), ThreadPoolExecutor(CONNECTIONS) as pool:
            found = self._list()
            if not found:
                message = f"{self._uri}: bucket {self._bucket} at {self._endpoint} has no files there"
                raise ModelError(message, reason=FailureReason.MODEL_NOT_FOUND)
            files = tuple(pool.map(self._describe_file, found))
        promised = sorted((file.name, file.size, file.digest) for file in files)
        found_commit = hashlib.sha256(json.dumps(promised).encode()).hexdigest()[:40]
        if commit not in (None, found_commit):
            raise failed(f"{self._uri} is not what it was: other files are there now")
        return RemoteModel(self._uri, found_commit, files)

    def download(self, model: RemoteModel, file: RemoteFile, path: Path) -> None:
        """Append the missing bytes to `path` in order, over several connections. Raises ModelError."""
        starts = range(find_present(path, file), file.size, BLOCK_BYTES)
        with self._errors_explained(), ProgressFile(path, file) as content:
            pool, blocks = ThreadPoolExecutor(CONNECTIONS), deque[Future[bytes]]()
            try:
                for start in starts:
                    blocks.append(pool.submit(self._read, file, start))
                    if len(blocks) == CONNECTIONS:
                        content.write(blocks.popleft().result())
                while blocks:
                    content.write(blocks.popleft().result())
            finally:
                pool.shutdown(cancel_futures=True)

    def _list(self) -> list[dict[str, Any]]:
        """List the objects of the prefix, and of the folders that the engine knows. Raises ModelError for too many."""
        found = self._list_folder("")
        names = {entry["Name"] for entry in found}
        for folder in (*MODULE_FOLDERS, *(PIPELINE_FOLDERS if PIPELINE_INDEX in names else ())):
            found += self._list_folder(f"{folder}/")
            self._check_number(len(found))
        known = keep_known(entry["Name"] for entry in found)
        return [entry for entry in found if entry["Name"] in known]

    def _list_folder(self, folder: str) -> list[dict[str, Any]]:
        prefix = f"{self._prefix}/{folder}"
        answer = self._client.list_objects_v2(Bucket=self._bucket, Prefix=prefix, Delimiter="/", MaxKeys=MAX_FILES)
        entries = answer.get("Contents", ())
        self._check_number(MAX_FILES + 1 if answer.get("IsTruncated") else len(entries))
        return [entry | {"Name": entry["Key"].removeprefix(f"{self._prefix}/")} for entry in entries]

    def _check_number(self, number: int) -> None:
        if number > MAX_FILES:
            raise failed(f"{self._uri} has more than {MAX_FILES} files and folders: it is no model's folder")

    def _describe_file(self, entry: dict[str, Any]) -> RemoteFile:
        name, size, etag = entry["Name"], entry["Size"], entry["ETag"].strip('"')
        if not isinstance(size, int) or size < 0 or not _ETAG.fullmatch(etag):
            raise failed(f"{self._endpoint} gives no size or no ETag of {name}")
        parts = _MD5_OF_PARTS.fullmatch(etag)
        head = self._head(name, **({"PartNumber": 1} if parts else {}))
        if _is_encrypted(head) or not (parts or _MD5.fullmatch(etag)):
            return RemoteFile(name, size, etag, "none")
        if parts is None:
            return RemoteFile(name, size, etag, "md5")
        part_bytes = self._find_part_bytes(name, size, int(parts[1]), head)
        return RemoteFile(name, size, etag, "none" if part_bytes is None else "md5", part_bytes)

    def _find_part_bytes(self, name: str, size: int, count: int, first: dict[str, Any]) -> int | None:
        """Return the size that each part has except the last; None if the sizes differ.

        Also returns None if the server does not support parts and describes the whole file.
        """
        if first.get("PartsCount") != count:
            return None
        last = first if count == 1 else self._head(name, PartNumber=count)
        part_bytes: int = first["ContentLength"]
        return part_bytes if part_bytes * (count - 1) + last["ContentLength"] == size else None

    def _head(self, name: str, **more: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self._client.head_object(Bucket=self._bucket, Key=f"{self._prefix}/{name}", **more)
        return answer

    def _read(self, file: RemoteFile, start: int) -> bytes:
        size = min(BLOCK_BYTES, file.size - start)
        answer = self._client.get_object(
            Bucket=self._bucket,
            Key=f"{self._prefix}/{file.name}",
            Range=f"bytes={start}-{start + size - 1}",
            IfMatch=f'"{file.digest}"',
        )
        if answer["ContentLength"] != size:
            answer["Body"].close()
            raise failed(f"{self._endpoint} sends other bytes of {self._uri}/{file.name} than it was asked for")
        content: bytes = answer["Body"].read()
        return content

    @contextmanager
    def _errors_explained(self) -> Iterator[None]:
        """Convert botocore's and urllib3's errors to this project's."""
        try:
            yield
        except ClientError as error:
            raise self._explain(error) from error
        except NoCredentialsError as error:
            message = f"{self._uri}: there are no credentials; set secretRef, or give the pods' ServiceAccount a role"
            raise failed(message) from error
        # HTTPError: TLS fails within a body. LookupError: the response lacks a field.
        except (BotoCoreError, HTTPError, ValueError, LookupError) as error:
            said = f"{type(error).__name__}: {without_secrets(str(error))}"
            raise failed(f"{self._uri} at {self._endpoint} cannot be fetched: {said}") from error

    def _explain(self, error: ClientError) -> ModelError:
        code, status = error.response["Error"]["Code"], error.response["ResponseMetadata"]["HTTPStatusCode"]
        said = f"{code}: {error.response['Error'].get('Message', '')} ({error.operation_name})"
        if code == "NoSuchBucket":
            message = f"{self._uri}: there is no bucket {self._bucket} at {self._endpoint}"
            return ModelError(message, reason=FailureReason.MODEL_NOT_FOUND)
        if code in _KEY_ERRORS:
            return failed(f"{self._uri} at {self._endpoint} refuses the keys: {said}")
        if status in (401, 403):
            needs = "the credentials need s3:ListBucket and s3:GetObject there"
            return failed(f"{self._uri} at {self._endpoint} is refused: {said}; {needs}")
        if status == 412:
            return failed(f"{self._uri} changed while it was fetched; the next attempt fetches its new content")
        return failed(f"{self._uri} at {self._endpoint} cannot be fetched: status {status}: {said}")


class _LimitedSession:
    """botocore's HTTP session, with responses limited by `limit_chunks`."""

    def __init__(self, session: Any, source: str) -> None:
        self._session, self._source = session, source

    def send(self, request: Any) -> Any:
        is_read_later, request.stream_output = request.stream_output, True
        answer = self._session.send(request)
        answer.raw = _LimitedBody(answer.raw, self._source)
        if not is_read_later:
            try:
                answer.content  # noqa: B018 - it is read, and kept
            except HTTPError as error:
                raise HTTPClientError(error=error) from error
        return answer

    def close(self) -> None:
        self._session.close()


class _LimitedBody:
    """A response of urllib3 in the form that botocore reads, with a body limited by `limit_chunks`."""

    def __init__(self, raw: Any, source: str) -> None:
        self._raw = raw
        self._chunks = limit_chunks(iter(lambda: raw.read1(_CHUNK_BYTES), b""), source, MAX_ANSWER_BYTES)

    def stream(self) -> Iterator[bytes]:
        return self._chunks

    def read(self, amount: int | None = None) -> bytes:
        assert amount is None, "an answer is read as a whole"
        return b"".join(self._chunks)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)


def _connect() -> Any:
    """Build an S3 client. Raises ModelError, BotoCoreError, ValueError."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise failed("AWS_ENDPOINT_URL is not the URL of an S3 API: it has to begin with https:// or http://")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or _DEFAULT_REGION
    config = Config(
        connect_timeout=10,
        read_timeout=30,
        retries={"mode": "standard", "total_max_attempts": 3},
        max_pool_connections=CONNECTIONS,
        response_checksum_validation="when_required",  # stored checksums cover whole objects, not ranges
        proxies={} if endpoint is not None and bypasses_proxy(endpoint) else None,
    )
    authorities = None if os.environ.get("AWS_CA_BUNDLE") else os.environ.get("SSL_CERT_FILE") or None
    return Session().create_client("s3", region_name=region, endpoint_url=endpoint, config=config, verify=authorities)


def _is_encrypted(head: dict[str, Any]) -> bool:
    """Return whether the ETag describes other bytes than a read returns, as with some kinds of encryption."""
    return "SSECustomerAlgorithm" in head or str(head.get("ServerSideEncryption")).startswith("aws:kms")
