"""Reads the files of a repository on the Hugging Face hub, through huggingface_hub. Used by `fetch`.

HF_ENDPOINT, HF_TOKEN, HF_TOKEN_PATH, HF_HUB_ETAG_TIMEOUT and HF_HUB_DOWNLOAD_TIMEOUT have the same meaning as in
huggingface_hub. Its download to a directory loses partial files when the process dies. Therefore this module uses
huggingface_hub's `http_get`, which can resume a partial file.
"""

import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from httpx2 import Client, Request, Response, SyncByteStream
from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_url, set_client_factory
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers, disable_progress_bars  # type: ignore[attr-defined]

from conveyor_engine.errors import ModelError
from conveyor_engine.fetching.bounds import MAX_ANSWER_BYTES, MAX_FILES, failed, limit_chunks
from conveyor_engine.fetching.source import (
    ProgressFile,
    RemoteFile,
    RemoteModel,
    find_present,
    is_plain_name,
    keep_known,
)
from conveyor_process.log import without_secrets
from conveyor_protocol.failure_reasons import FailureReason

# huggingface_hub has its own handler, which writes to stderr in another format.
logging.getLogger("huggingface_hub").handlers.clear()

_TOKEN = re.compile(r"[!-~]*")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # SHA-1 or SHA-256; its first characters become part of a file name
_log = logging.getLogger(__name__)


class Hub:
    """One repository at one revision."""

    def __init__(self, repository: str, revision: str) -> None:
        self._repository, self._revision = repository, revision
        self._max_bytes: int | None = MAX_ANSWER_BYTES
        set_client_factory(self._build_client)

    def describe(self, commit: str | None = None) -> RemoteModel:
        """Return the current content of the revision. Raises ModelError (ModelNotFound, ModelDownloadFailed)."""
        repository, revision = self._repository, commit or self._revision
        with _errors_explained(repository, revision):
            info = HfApi(endpoint=_endpoint(), token=_token()).model_info(
                repository, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
            )
            listed = info.siblings or ()
            names = keep_known(sibling.rfilename for sibling in listed)
            known = [sibling for sibling in listed if sibling.rfilename in names]
            if len(known) > MAX_FILES:
                raise failed(f"{repository} has more than {MAX_FILES} files: it is no model's repository")
            files = tuple(map(_describe_file, known))
            if info.sha is None or not is_plain_name(info.sha):
                raise failed(f"{_shown_endpoint()} does not say which commit {revision} is")
        _log.info("event=revision_pinned repository=%s revision=%s commit=%s", repository, revision, info.sha)
        return RemoteModel(f"{repository}@{info.sha[:12]}", info.sha, files)

    def download(self, model: RemoteModel, file: RemoteFile, path: Path) -> None:
        """Append the missing bytes to `path`, or fewer if the hub's response ends early. Raises ModelError."""
        present = find_present(path, file)
        if present == file.size > 0:
            return
        url = hf_hub_url(self._repository, file.name, revision=model.commit, endpoint=_endpoint())
        disable_progress_bars()
        with _errors_explained(self._repository, model.commit), ProgressFile(path, file) as content:
            location = get_hf_file_metadata(url, token=_token()).location
            headers = build_hf_headers(token=_token() if has_one_origin(url, location) else False)
            self._max_bytes = None  # `content` accepts no more than the announced size
            http_get(location, content, resume_size=present, headers=headers)

    def _build_client(self) -> Client:
        """Build a client like huggingface_hub's, with limits on responses.

        The client sets no time-out, because each request of huggingface_hub sets its own.
        """
        hooks: dict[str, list[Callable[..., Any]]] = {"request": [_refuse_encoding], "response": [self._limit]}
        return Client(event_hooks=hooks, follow_redirects=True, timeout=None)

    def _limit(self, response: Response) -> None:
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise failed(f"{_shown_endpoint()} compresses its answers, although the requests forbid it")
        response.stream = _Limited(cast(SyncByteStream, response.stream), self._max_bytes)


class _Limited(SyncByteStream):
    """The body of a response, limited by `limit_chunks`."""

    def __init__(self, stream: SyncByteStream, max_bytes: int | None) -> None:
        self._stream, self._max_bytes = stream, max_bytes

    def __iter__(self) -> Iterator[bytes]:
        return limit_chunks(self._stream, _shown_endpoint(), self._max_bytes)

    def close(self) -> None:
        self._stream.close()


def _refuse_encoding(request: Request) -> None:
    """Request uncompressed responses, because a few compressed bytes can expand to very many."""
    request.headers["Accept-Encoding"] = "identity"


def _describe_file(sibling: Any) -> RemoteFile:
    lfs = sibling.lfs
    size, digest = (sibling.size, sibling.blob_id) if lfs is None else (lfs.size, lfs.sha256)
    if not isinstance(size, int) or size < 0 or not _DIGEST.fullmatch(digest or ""):
        raise failed(f"{_shown_endpoint()} gives no size or no digest of {sibling.rfilename}")
    return RemoteFile(sibling.rfilename, size, digest, "git" if lfs is None else "sha256")


def has_one_origin(url: str, location: str) -> bool:
    """Return whether both addresses have the same scheme, host and port.

    If not, `location` is a signed address on another host, or has no TLS. It must not get the token.
    """
    return urlsplit(url)[:2] == urlsplit(location)[:2]  # scheme, host and port


@contextmanager
def _errors_explained(repository: str, revision: str) -> Iterator[None]:
    """Convert huggingface_hub's errors to ours.

    It catches all exceptions, because huggingface_hub also raises its HTTP library's errors. Nothing else in this
    process catches all exceptions.
    """
    where = f"at {_shown_endpoint()}"
    try:
        yield
    except ModelError:
        raise
    except GatedRepoError as error:
        raise failed(f"{repository} {where} is gated: accept its terms there and give a token (HF_TOKEN)") from error
    except RepositoryNotFoundError as error:
        message = f"{repository} does not exist {where}, or is private and needs another token (HF_TOKEN)"
        raise ModelError(message, reason=FailureReason.MODEL_NOT_FOUND) from error
    except RevisionNotFoundError as error:
        raise ModelError(
            f"{repository} {where} has no revision {revision}", reason=FailureReason.MODEL_NOT_FOUND
        ) from error
    except HfHubHTTPError as error:
        message = f"{repository} {where} cannot be fetched: status {error.response.status_code}"
        raise failed(message) from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
            raise  # an error of the disk, not of the network
        raise failed(
            f"{repository} {where} cannot be fetched: {type(error).__name__}: {without_secrets(str(error))}"
        ) from error


def _endpoint() -> str:
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or constants.ENDPOINT
    if not endpoint.startswith(("http://", "https://")):
        raise failed("HF_ENDPOINT is not the URL of a hub: it has to begin with https:// or http://")
    return endpoint


def _shown_endpoint() -> str:
    return without_secrets(_endpoint())


def _token() -> str | bool:
    """Return the token. False: send none, not even a saved one. Raises ModelError, without the token in its message."""
    token = os.environ.get("HF_TOKEN", "").strip() or _read_token_file()
    if not _TOKEN.fullmatch(token):
        raise failed("HF_TOKEN is not one word of ASCII characters: look at the key of its Secret")
    return token or False


def _read_token_file() -> str:
    path = os.environ.get("HF_TOKEN_PATH")
    if not path:
        return ""
    try:
        return Path(path).read_text(errors="surrogateescape").strip()
    except OSError as error:
        raise failed(f"HF_TOKEN_PATH names {path}, which cannot be read: {error.strerror}") from error
