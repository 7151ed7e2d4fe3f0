"""Names the folder of an unfinished download, and removes downloads. Used by `fetch` and `serving.adapter_file`."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

MARKER: Final = ".conveyor-complete.json"  # in the folder of a complete download
_PARTIAL: Final = ".partial"


def partial_of(directory: Path) -> Path:
    """Return the folder that becomes `directory` when the download is complete."""
    return directory.with_name(f".{directory.name}{_PARTIAL}")


def list_downloads(folder: Path) -> Iterator[Path]:
    """Yield the folders of all downloads in a folder, complete ones and unfinished ones."""
    yield from (marker.parent for marker in folder.rglob(MARKER))
    for partial in folder.rglob(f".*{_PARTIAL}"):
        yield partial.with_name(partial.name[1 : -len(_PARTIAL)])


def remove_download(directory: Path) -> None:
    """Remove what has been downloaded for `directory`, as far as possible."""
    for each in (directory, partial_of(directory)):
        shutil.rmtree(each, ignore_errors=True)
