"""Checks that a mounted model is there, can be read, and is inside its volume. Used by `fetch`."""

import logging
from pathlib import Path
from typing import Final

from conveyor_engine.errors import ModelError
from conveyor_engine.fetching.source import POOLING_FILE
from conveyor_engine.fetching.uris import find_mounted_path
from conveyor_engine.model_files import MODEL_FILES, check_files, list_folders, unreadable
from conveyor_protocol.failure_reasons import FailureReason

_LOADED: Final = (".json", ".jinja", ".model", ".pt2", ".safetensors", ".txt")
_log = logging.getLogger(__name__)


def check_model_directory(uri: str, directory: Path) -> None:
    """Check that the directory contains a readable model.

    Raises ModelError: ModelNotFound (with the directory's content) or ModelUnreadable.
    """
    try:
        names = sorted(entry.name for entry in directory.iterdir())
        _check_links(directory, names, _find_volume(uri, directory))
        is_model = any((directory / name).is_file() for name in MODEL_FILES)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ModelError(f"{uri}: there is no directory {directory}", reason=FailureReason.MODEL_NOT_FOUND) from error
    except OSError as error:
        raise unreadable(directory, error) from error
    if not is_model:
        found = f"it holds {', '.join(names[:10])}" if names else "it is empty"
        raise ModelError(
            f"{uri}: {directory} has none of {', '.join(MODEL_FILES)}, so it is no model; {found}",
            reason=FailureReason.MODEL_NOT_FOUND,
        )
    check_files(directory)
    _log.info("event=model_found uri=%s directory=%s", uri, directory)


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
    for name in (*names, POOLING_FILE, *within):
        path = directory / name
        if path.suffix in _LOADED and not (real := path.resolve()).is_relative_to(inside):
            message = f"{path} leads to {real}, outside of its volume {volume}; replace the link by the file"
            raise ModelError(message, reason=FailureReason.MODEL_UNREADABLE)
