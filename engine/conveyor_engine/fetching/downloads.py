"""Names the folder of an unfinished download, and removes downloads. Used by `fetch` and `serving.adapter_file`."""

import shutil
from pathlib import Path


def partial_of(directory: Path) -> Path:
    """Return the folder that becomes `directory` when the download is complete."""
    return directory.with_name(f".{directory.name}.partial")


def remove_download(directory: Path) -> None:
    """Remove what has been downloaded for `directory`, as far as possible."""
    for each in (directory, partial_of(directory)):
        shutil.rmtree(each, ignore_errors=True)
