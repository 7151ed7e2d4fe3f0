"""The Hugging Face hub, through huggingface_hub: what a repository holds, and one file's bytes. Used by `fetch`.

HF_ENDPOINT, HF_TOKEN, HF_HUB_ETAG_TIMEOUT and HF_HUB_DOWNLOAD_TIMEOUT mean what they mean to huggingface_hub. Its own
download to a directory forgets partial files when the process dies, so the bytes are taken with its `http_get`, which
can go on where a file ends.
"""

import io
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers, disable_progress_bars  # type: ignore[attr-defined]

from conveyor_engine.errors import ModelError
from conveyor_process.failure_reasons import FailureReason
from conveyor_process.log import without_secrets

# It has its own handler, which writes to stderr in another form.
logging.getLogger("huggingface_hub").handlers.clear()

_TOKEN = re.compile(r"[!-~]*")
_PLAIN_NAME = re.compile(r"[\w.+-]+")  # names are not trusted, and files in folders are not wanted ...
POOLING_FILE = "1_Pooling/config.json"  # ... but this one, of models that embed
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # SHA-1 or SHA-256; a part of it becomes a part of a file's name
_PROGRESS_SECONDS = 5.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file as the hub promises it."""

    name: str
    size: int  # bytes
    digest: str  # hex: SHA-256 if `is_large`, else git's blob id
    is_large: bool  # kept outside of git (LFS)


@dataclass(frozen=True, slots=True)
class HubModel:
    """One commit of a repository, the files at its root, and the one below that may be wanted."""

    repository: str
    commit: str
    files: tuple[HubFile, ...]

    def __str__(self) -> str:
        return f"{self.repository}@{self.commit[:12]}"


def describe_model(repository: str, revision: str) -> HubModel:
    """What the revision is now. Raises ModelError (ModelNotFound, ModelDownloadFailed)."""
    with _errors_explained(repository, revision):
        info = HfApi(endpoint=_endpoint(), token=_token()).model_info(
            repository, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
        )
        files = tuple(_describe_file(s) for s in info.siblings or () if _is_known_form(s.rfilename))
        if info.sha is None or not _PLAIN_NAME.fullmatch(info.sha):
            raise _failed(f"{_shown_endpoint()} does not say which commit {revision} is")
    _log.info("event=revision_pinned repository=%s revision=%s commit=%s", repository, revision, info.sha)
    return HubModel(repository, info.sha, files)


def _is_known_form(name: str) -> bool:
    return name == POOLING_FILE or _PLAIN_NAME.fullmatch(name) is not None


def _describe_file(sibling: Any) -> HubFile:
    lfs = sibling.lfs
    size, digest = (sibling.size, sibling.blob_id) if lfs is None else (lfs.size, lfs.sha256)
    if not isinstance(size, int) or size < 0 or not _DIGEST.fullmatch(digest or ""):
        raise _failed(f"{_shown_endpoint()} gives no size or no digest of {sibling.rfilename}")
    return HubFile(sibling.rfilename, size, digest, is_large=lfs is not None)


def download(model: HubModel, file: HubFile, path: Path) -> None:
    """Appends to `path` the bytes that it lacks, or as many as the hub has. Raises ModelError."""
    present = path.stat().st_size if path.exists() else 0
    if present > file.size:
        path.unlink()
        present = 0
    if present == file.size > 0:
        return
    if present:
        _log.info("event=file_resumed file=%s bytes_present=%d bytes=%d", file.name, present, file.size)
    url = hf_hub_url(model.repository, file.name, revision=model.commit, endpoint=_endpoint())
    disable_progress_bars()
    with _errors_explained(model.repository, model.commit), _ProgressFile(path, file) as content:
        location = get_hf_file_metadata(url, token=_token()).location
        headers = build_hf_headers(token=_token() if has_one_origin(url, location) else False)
        http_get(location, content, resume_size=present, headers=headers)


def has_one_origin(url: str, location: str) -> bool:
    """Else `location` is a signed address of another host, or one without TLS, and the token is not for it."""
    return urlsplit(url)[:2] == urlsplit(location)[:2]  # scheme, host and port


class _ProgressFile(io.FileIO):
    """A file that takes all or raises OSError, and says from time to time how much of it has come.

    More than the hub promised is refused (ModelError, ChecksumMismatch): it could fill the volume.
    """

    def __init__(self, path: Path, file: HubFile) -> None:
        super().__init__(path, "ab")
        self._file = file
        self._spoke = time.monotonic()

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self._file.size:
            self.truncate(0)
            message = f"{self._file.name} has more than the {self._file.size} bytes the hub promised; it is deleted"
            raise ModelError(message, reason=FailureReason.CHECKSUM_MISMATCH)
        written = 0
        while written < len(data):  # a disk that becomes full takes a part first, and refuses the rest
            written += super().write(data[written:])
        if time.monotonic() - self._spoke > _PROGRESS_SECONDS:
            self._spoke = time.monotonic()
            percent = 100 * self.tell() / max(1, self._file.size)
            _log.info("event=fetching file=%s percent=%.0f bytes=%d", self._file.name, percent, self._file.size)
        return written


@contextmanager
def _errors_explained(repository: str, revision: str) -> Iterator[None]:
    """huggingface_hub's errors as ours. The one broad except of the fetching process: it raises its HTTP library's."""
    where = f"at {_shown_endpoint()}"
    try:
        yield
    except ModelError:
        raise
    except GatedRepoError as error:
        raise _failed(f"{repository} {where} is gated: accept its terms there and give a token (HF_TOKEN)") from error
    except RepositoryNotFoundError as error:
        message = f"{repository} does not exist {where}, or is private and needs another token (HF_TOKEN)"
        raise ModelError(message, reason=FailureReason.MODEL_NOT_FOUND) from error
    except RevisionNotFoundError as error:
        raise ModelError(
            f"{repository} {where} has no revision {revision}", reason=FailureReason.MODEL_NOT_FOUND
        ) from error
    except HfHubHTTPError as error:
        message = f"{repository} {where} cannot be fetched: status {error.response.status_code}"
        raise _failed(message) from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
            raise  # the disk's, not the network's
        raise _failed(
            f"{repository} {where} cannot be fetched: {type(error).__name__}: {without_secrets(str(error))}"
        ) from error


def _endpoint() -> str:
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or constants.ENDPOINT
    if not endpoint.startswith(("http://", "https://")):
        raise _failed("HF_ENDPOINT is not the URL of a hub: it has to begin with https:// or http://")
    return endpoint


def _shown_endpoint() -> str:
    return without_secrets(_endpoint())


def _token() -> str | bool:
    """False: send none, not even one that was saved on this machine. Raises ModelError, which does not show it."""
    token = os.environ.get("HF_TOKEN", "").strip()
    if not _TOKEN.fullmatch(token):
        raise _failed("HF_TOKEN is not one word of ASCII characters: look at the key of its Secret")
    return token or False


def _failed(message: str) -> ModelError:
    return ModelError(message, reason=FailureReason.MODEL_DOWNLOAD_FAILED)
