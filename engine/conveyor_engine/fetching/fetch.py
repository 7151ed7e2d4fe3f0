"""Downloads the files of a model or an adapter from a hub or a bucket into a directory, all of them or none.

Called by `__main__`. First the revision is pinned to a commit. Only files that the engine loads are fetched, never
pickles or code. The weights come last: if the other files show that the engine cannot run the model, it is rejected
before. Every file is checked against the announced digest. Partial files are resumed after a crash. The
directory appears by one rename, with a marker in it. A complete directory with a marker for the same URI is never
fetched again, so a branch that moved needs another target. If the marker was written by an engine that wanted other
files, missing files of the same commit are added.
"""

import errno
import fcntl
import json
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from conveyor_engine.errors import ConfigError, ModelError, StartError
from conveyor_engine.fetching.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, choose_adapter_files
from conveyor_engine.fetching.bounds import MIN_BYTES, TooSlow
from conveyor_engine.fetching.credentials import use_credentials
from conveyor_engine.fetching.downloads import MARKER, partial_of
from conveyor_engine.fetching.mounted import check_adapter_directory, check_model_directory
from conveyor_engine.fetching.pipeline import choose_pipeline_files
from conveyor_engine.fetching.preview import NO_TASK, check_before_weights
from conveyor_engine.fetching.source import HEAD_FILES, MODULE_FILES, RemoteFile, RemoteModel, Source, compute_digest
from conveyor_engine.fetching.uris import HubUri, parse_uri
from conveyor_engine.gguf.files import choose_files as choose_gguf
from conveyor_engine.gguf.files import group_files
from conveyor_engine.model_files import (
    EXPORTED_PROGRAM,
    MODEL_CARD,
    MODEL_FILES,
    PIPELINE_INDEX,
    PROGRAM_SETTINGS,
    QUANTIZATION_FILES,
    WEIGHTS_INDEX,
    read_object,
)
from conveyor_protocol.failure_reasons import FailureReason

_WANTED = re.compile(
    r"config\.json|model\.json|generation_config\.json|tokenizer\.json|tokenizer_config\.json|tokenizer\.model|vocab\.json"
    r"|merges\.txt|special_tokens_map\.json|added_tokens\.json|chat_template\.(?:jinja|json)"
    r"|(?:pre)?processor_config\.json"
    r"|modules\.json|sentence_bert_config\.json|config_sentence_transformers\.json"
    # vLLM loads the weights that the last files describe; the engine names their format.
    f"|{'|'.join(map(re.escape, (*MODULE_FILES, *HEAD_FILES, *QUANTIZATION_FILES)))}"
)
_WANTED_OF_ADAPTER = re.compile(f"{re.escape(ADAPTER_CONFIG)}|{re.escape(ADAPTER_WEIGHTS)}")
_WEIGHTS = "model.safetensors"
# On these errors the partial files are removed. Otherwise two fetches could fill one volume so that neither can finish.
_FULL = (errno.ENOSPC, errno.EDQUOT)
_MAX_SHORT_CUTS = 20  # maximum number of successive interruptions of a file, each after less than 64 KiB
_log = logging.getLogger(__name__)


def fetch(uri: str, target: str, adapter: str = "", task: str = NO_TASK, credentials: str = "") -> None:
    """Download the model of `uri` to the directory `target`. If the model is mounted, only check that it is there.

    adapter: the name of the LoRA adapter that `uri` contains in place of a model; "" for a model. Errors have it.
    task: of the engine that will serve the model; `auto`: the one that its files show; NO_TASK: of another runtime.
    credentials: the folder of a mounted Secret; "" without one. Raises StartError.
    """
    try:
        if credentials:
            use_credentials(uri, Path(credentials))
        _fetch(uri, Path(target), NO_TASK if adapter else task, is_adapter=bool(adapter))
    except ModelError as error:
        if not adapter:
            raise
        raise ModelError(f"adapter {adapter}: {error}", reason=error.reason) from error


def _fetch(uri: str, directory: Path, task: str, is_adapter: bool) -> None:
    source = _open_source(uri)
    if source is None and is_adapter:
        check_adapter_directory(uri, directory)
    elif source is None:
        check_model_directory(uri, directory)
    else:
        try:
            _fetch_once(uri, source, directory, _WANTED_OF_ADAPTER if is_adapter else _WANTED, task)
        except OSError as error:
            _refuse(f"cannot write {uri} to {directory}: {error.strerror or error}")


def _open_source(uri: str) -> Source | None:
    """Open the source; None for a mounted model. Imports only the library that it needs. Raises StartError."""
    parsed = parse_uri(uri)
    if parsed is None:
        return None
    if isinstance(parsed, HubUri):
        from conveyor_engine.fetching.hub import Hub

        return Hub(parsed.repository, parsed.revision)
    from conveyor_engine.fetching.bucket import Bucket

    return Bucket(*parsed)


def _fetch_once(uri: str, source: Source, directory: Path, wanted: re.Pattern[str], task: str) -> None:
    """Fetch the model unless it is there. If several pods share the volume, one fetches and the others wait for it.

    wanted: matches the names of wanted files; `_WANTED` also for the weights that belong to a model.
    """
    if _is_complete(uri, directory, _read_marker(uri, directory), wanted):
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _lock(directory.with_name(f".{directory.name}.lock")):
        marker = _read_marker(uri, directory)
        if _is_complete(uri, directory, marker, wanted):
            return
        if marker is not None:
            _add_missing(source, marker, directory, wanted)
            return
        model = source.describe()
        partial = partial_of(directory)
        partial.mkdir(exist_ok=True)
        try:
            files = _fetch_files(source, model, partial, wanted, _find_file(uri), task)
        except OSError as error:
            if error.errno in _FULL:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        _write_marker(partial, uri, model.commit, _content_of(files), wanted)
        if directory.exists():
            shutil.rmtree(directory)  # without a marker it may be incomplete
        partial.rename(directory)
    _log.info("event=model_fetched uri=%s commit=%s directory=%s files=%d", uri, model.commit, directory, len(files))


def _read_marker(uri: str, directory: Path) -> dict[str, Any] | None:
    """Return the directory's marker if it is for this model and every file still has its size; otherwise None."""
    try:
        marker: dict[str, Any] = json.loads((directory / MARKER).read_text())
        complete = parse_uri(marker["uri"]) == parse_uri(uri) and all(
            (directory / name).stat().st_size == file["size"] for name, file in marker["files"].items()
        )
    except (ConfigError, OSError, ValueError, LookupError, TypeError, AttributeError):  # there is no valid marker
        return None
    return marker if complete else None


def _is_complete(uri: str, directory: Path, marker: dict[str, Any] | None, wanted: re.Pattern[str]) -> bool:
    """Return whether the engine that fetched the directory had the same list of wanted files as this engine."""
    if marker is None or marker.get("wanted") != wanted.pattern:
        return False
    _log.info("event=model_complete_already uri=%s commit=%s directory=%s", uri, marker.get("commit"), directory)
    return True


def _add_missing(source: Source, marker: dict[str, Any], directory: Path, wanted: re.Pattern[str]) -> None:
    """Add files that this engine needs, but that an older engine did not fetch when it filled the directory.

    Other pods may read the directory meanwhile. Errors are only logged: the older engine ran without the files.
    """
    try:
        model = source.describe(str(marker.get("commit")))
        chosen = _choose(model, wanted, _find_file(marker["uri"]), directory)
        # The card only explains why a model is rejected, and this one was not.
        files = [file for file in chosen if file.name not in marker["files"] and file.name != MODEL_CARD]
        _fetch_missing(source, model, files, directory)
        _write_marker(directory, marker["uri"], model.commit, marker["files"] | _content_of(files), wanted)
    except (StartError, OSError) as error:
        _log.warning("event=missing_files_not_fetched directory=%s error=%s", directory, error)
        return
    _log.info("event=missing_files_fetched directory=%s files=%d", directory, len(files))


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock that one process has at a time. The kernel releases it if that process dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("event=waiting_for_another_fetch lock=%s", path)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _find_file(uri: str) -> str:
    """Return the file of a repository that the address names; "" if it names none."""
    parsed = parse_uri(uri)
    return parsed.file if isinstance(parsed, HubUri) else ""


def _fetch_files(
    source: Source, model: RemoteModel, partial: Path, wanted: re.Pattern[str], file: str, task: str
) -> list[RemoteFile]:
    good = {each for each in model.files if _is_good(each, partial / each.name)}
    index = None if wanted is _WANTED_OF_ADAPTER else _index_of(model, file)
    if index is not None:  # it says which weights belong to the model
        _remove_other_files(partial, model.files, good)
        _fetch_missing(source, model, [index] if index not in good else [], partial)
        good.add(index)
    files = _choose(model, wanted, file, partial)
    _remove_other_files(partial, files, good)
    missing = [each for each in files if each not in good]
    _check_space(model, missing, partial)
    weights = [each for each in missing if each.name.endswith(".safetensors")]
    _fetch_missing(source, model, [each for each in missing if each not in weights], partial)
    if weights and any((partial / name).is_file() for name in ("config.json", PIPELINE_INDEX)):
        check_before_weights(model.title, partial, task)
    _fetch_missing(source, model, weights, partial)
    return files


def _index_of(model: RemoteModel, file: str) -> RemoteFile | None:
    """Return the file that names a model's weights; None if there is none, or if other files have the weights."""
    by_name = {each.name: each for each in model.files}
    return None if PIPELINE_INDEX in by_name or _is_gguf(by_name, file) else by_name.get(WEIGHTS_INDEX)


def _is_gguf(names: Collection[str], file: str) -> bool:
    return bool(file or (group_files(names) and not any(name.endswith(".safetensors") for name in names)))


def _choose(model: RemoteModel, wanted: re.Pattern[str], file: str, directory: Path) -> list[RemoteFile]:
    """Return the files to fetch. file: the one that the address names. directory: has the index, if the model has one.

    Raises StartError.
    """
    by_name = {each.name: each for each in model.files}
    if wanted is _WANTED_OF_ADAPTER:
        if file:
            raise ConfigError(f"an adapter is a folder, so its address cannot name the file {file!r}")
        return choose_adapter_files(model)
    if _is_gguf(by_name, file):
        return [by_name[name] for name in choose_gguf(model.title, by_name, file)]
    if not by_name.keys() & MODEL_FILES:
        raise ModelError(f"{model} has none of {', '.join(MODEL_FILES)}: it is no model")
    index = _index_of(model, file)
    return [index, *choose_files(model, _weights_of_index(directory))] if index else choose_files(model, None)


def _remove_other_files(partial: Path, files: Iterable[RemoteFile], good: set[RemoteFile]) -> None:
    """Remove all but `files` and their unfinished downloads, to free space. Nothing is served from `partial`."""
    of_use = {file.name if file in good else _unfinished_name(file) for file in files}
    for path in list(partial.rglob("*")):
        if not path.is_dir() and path.relative_to(partial).as_posix() not in of_use:
            path.unlink()


def _fetch_missing(source: Source, model: RemoteModel, files: list[RemoteFile], partial: Path) -> None:
    """Fetch these files. Raises ModelError before the first byte if they do not fit on the volume."""
    _check_space(model, files, partial)
    for number, file in enumerate(files, start=1):
        _fetch_file(source, model, file, partial)
        _log.info("event=file_complete file=%s bytes=%d number=%d of=%d", file.name, file.size, number, len(files))


def _check_space(model: RemoteModel, files: list[RemoteFile], partial: Path) -> None:
    """Raise ModelError if the missing bytes of these files do not fit on the volume."""
    unfinished = [partial / _unfinished_name(file) for file in files]
    missing = sum(file.size for file in files) - sum(map(_size, unfinished))
    free = shutil.disk_usage(partial).free
    if missing > free:
        _refuse(f"{model} needs {missing / 2**30:.1f} GiB more, but {partial.parent} has {free / 2**30:.1f} GiB free")


def choose_files(model: RemoteModel, weights: Iterable[str] | None) -> list[RemoteFile]:
    """Return the files that the engine loads. weights: the files in the index; None: the model has no index."""
    by_name = {file.name: file for file in model.files}
    if PIPELINE_INDEX in by_name:
        return [by_name[name] for name in choose_pipeline_files(model.title, by_name)]
    if EXPORTED_PROGRAM in by_name and "config.json" not in by_name:
        return [by_name[name] for name in (EXPORTED_PROGRAM, PROGRAM_SETTINGS) if name in by_name]
    if weights is None:
        at_root = [name for name in by_name if name.endswith(".safetensors") and "/" not in name]
        weights = [_WEIGHTS] if _WEIGHTS in by_name else at_root
    weights = sorted(set(weights))
    if absent := [name for name in weights if name not in by_name]:
        raise ModelError(f"{model}: the index names {', '.join(absent)}, which is not there")
    if not weights and PROGRAM_SETTINGS not in by_name:
        pickles = sorted(name for name in by_name if name.endswith((".bin", ".pt", ".pth")))
        found = f"only {', '.join(pickles)}, and pickles can run code when they are loaded" if pickles else "none"
        raise ModelError(
            f"{model} has no safetensors weights ({found}); use a commit that has them, such as an older "
            "one or that of a pull request to the repository"
        )
    card = {MODEL_CARD} if weights else set()
    kept = [file for name, file in by_name.items() if _WANTED.fullmatch(name) or name in card]
    return kept + [by_name[name] for name in weights]


def _weights_of_index(partial: Path) -> list[str]:
    try:
        weights = list(read_object(partial / WEIGHTS_INDEX)["weight_map"].values())
    except (LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{WEIGHTS_INDEX} cannot be read: {error!r}") from error
    if others := [name for name in weights if not (isinstance(name, str) and name.endswith(".safetensors"))]:
        raise ModelError(f"{WEIGHTS_INDEX} names {others[0]!r}, which is no safetensors file")
    return weights


def _fetch_file(source: Source, model: RemoteModel, file: RemoteFile, partial: Path) -> None:
    """Download the file under an unfinished name, check it, and rename it.

    Raises ModelError and deletes the file if its size or digest is wrong.
    """
    unfinished = partial / _unfinished_name(file)
    _download(source, model, file, unfinished)
    size, digest = unfinished.stat().st_size, compute_digest(unfinished, file)
    if size != file.size or digest != file.digest:
        unfinished.unlink()
        raise ModelError(
            f"{file.name} of {model} has {size} bytes and digest {digest}, but the source announced {file.size} bytes "
            f"and digest {file.digest}; the local copy was deleted",
            reason=FailureReason.CHECKSUM_MISMATCH,
        )
    (partial / file.name).parent.mkdir(exist_ok=True)
    unfinished.rename(partial / file.name)


def _download(source: Source, model: RemoteModel, file: RemoteFile, unfinished: Path) -> None:
    """Download the file. Resumes an interrupted download while it makes progress. Otherwise raises ModelError."""
    num_short = 0  # number of successive interruptions after few bytes
    while True:
        before = _size(unfinished)
        try:
            return source.download(model, file, unfinished)
        except ModelError as error:
            is_cut = error.reason == FailureReason.MODEL_DOWNLOAD_FAILED and not isinstance(error, TooSlow)
            brought = _size(unfinished) - before
            num_short = num_short + 1 if brought < MIN_BYTES else 0
            if not is_cut or brought <= 0 or num_short > _MAX_SHORT_CUTS:
                raise
            _log.warning("event=download_cut file=%s bytes_present=%d error=%s", file.name, _size(unfinished), error)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _unfinished_name(file: RemoteFile) -> str:
    """Return a name that contains the digest, so that a download never resumes with other content."""
    return f"{file.name.replace('/', '.')}.{file.digest[:16]}.unfinished"


def _is_good(file: RemoteFile, path: Path) -> bool:
    return path.is_file() and path.stat().st_size == file.size and compute_digest(path, file) == file.digest


def _content_of(files: list[RemoteFile]) -> dict[str, Any]:
    return {file.name: {"size": file.size, "digest": file.digest} for file in files}


def _write_marker(directory: Path, uri: str, commit: str, files: dict[str, Any], wanted: re.Pattern[str]) -> None:
    """Write the marker by one rename, after all files that it names are synced to the disk."""
    for name in files:
        with (directory / name).open("rb") as content:
            os.fsync(content.fileno())
    unfinished = directory / f"{MARKER}.unfinished"
    with unfinished.open("w") as written:
        json.dump({"uri": uri, "commit": commit, "wanted": wanted.pattern, "files": files}, written, indent=1)
        written.flush()
        os.fsync(written.fileno())
    unfinished.rename(directory / MARKER)


def _refuse(message: str) -> NoReturn:
    raise ModelError(message, reason=FailureReason.MODEL_DOWNLOAD_FAILED)
