"""Checks that a mounted model or adapter is there, can be read, and is inside its volume. Used by `fetch`."""

import logging
from pathlib import Path
from typing import Final, NoReturn

from conveyor_engine.errors import ModelError
from conveyor_engine.fetching.adapter import find_problem
from conveyor_engine.fetching.source import MODULE_FILES
from conveyor_engine.fetching.uris import find_mounted_path
from conveyor_engine.gguf.files import SUFFIX, find_files, list_names
from conveyor_engine.model_files import MODEL_FILES, check_files, list_folders, unreadable
from conveyor_protocol.failure_reasons import FailureReason

_LOADED: Final = (SUFFIX, ".json", ".jinja", ".model", ".pt2", ".safetensors", ".txt")
_log = logging.getLogger(__name__)


def check_model_directory(uri: str, directory: Path) -> None:
    """Check that the directory contains a readable model.

    Raises ModelError: ModelNotFound (with the directory's content) or ModelUnreadable.
    """
    is_file = directory.suffix == SUFFIX
    folder = directory.parent if is_file else directory
    names = _list_safe(uri, folder, _find_volume(uri, directory))
    if not find_files(directory) and (is_file or not any((folder / name).is_file() for name in MODEL_FILES)):
        _refuse(f"{uri}: {directory} has none of {', '.join(MODEL_FILES)} and no GGUF file, so it is no model", names)
    if not is_file:
        check_files(directory)
    _log.info("event=model_found uri=%s directory=%s", uri, directory)


def check_adapter_directory(uri: str, directory: Path) -> None:
    """Check that the directory contains a readable adapter. Raises ModelError as `check_model_directory` does."""
    names = _list_safe(uri, directory, _find_volume(uri, directory))
    if problem := find_problem([name for name in names if (directory / name).is_file()]):
        _refuse(f"{uri}: {directory} {problem}", names)
    check_files(directory)
    _log.info("event=adapter_found uri=%s directory=%s", uri, directory)


def _list_safe(uri: str, directory: Path, volume: Path) -> list[str]:
    """Return the names in the directory. Raises ModelError if there is none, or if a link leads out of the volume."""
    try:
        names = sorted(entry.name for entry in directory.iterdir())
        _check_links(directory, names, volume)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ModelError(f"{uri}: there is no directory {directory}", reason=FailureReason.MODEL_NOT_FOUND) from error
    except OSError as error:
        raise unreadable(directory, error) from error
    return names


def _refuse(problem: str, names: list[str]) -> NoReturn:
    found = f"it holds {', '.join(names[:10])}" if names else "it is empty"
    raise ModelError(f"{problem}; {found}", reason=FailureReason.MODEL_NOT_FOUND)


def _find_volume(uri: str, directory: Path) -> Path:
    """Return the mount point of the volume: `directory` without the path in `uri`, if it ends with that path."""
    within = Path(find_mounted_path(uri)).parts
    found = directory.parts[-len(within) :] == within if within else False
    return directory.parents[len(within) - 1] if found else directory


def _check_links(directory: Path, names: list[str], volume: Path) -> None:
    """Raise ModelError if a link points to a file outside the volume.

    The content of such a file could reach clients, for example as the text of a chat template. Links within the volume
    are common, because huggingface_hub's cache consists of them.
    """
    inside = volume.resolve()
    _, *parts = list_folders(directory)
    within = [path.relative_to(directory).as_posix() for folder in parts for path in folder.iterdir()]
    for name in (*names, *MODULE_FILES, *within, *list_names(directory)):
        path = directory / name
        if path.suffix in _LOADED and not (real := path.resolve()).is_relative_to(inside):
            message = f"{path} leads to {real}, outside of its volume {volume}; replace the link by the file"
            raise ModelError(message, reason=FailureReason.MODEL_UNREADABLE)
