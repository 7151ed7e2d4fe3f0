"""Finds the GGUF files of a model. Used where models are downloaded, mounted and served."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from conveyor_engine.errors import ModelError

SUFFIX: Final = ".gguf"
_PART: Final = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")  # llama.cpp's name for one of several files


def group_files(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the files of each model among `names` by the model's name, which has no suffix and no number.

    Encoders of images (`mmproj`) and matrices for quantizing (`imatrix`) are no models.
    """
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        last = name.rpartition("/")[2]
        if name.endswith(SUFFIX) and not any(word in last.lower() for word in ("mmproj", "imatrix")):
            groups.setdefault(_PART.sub("", name).removesuffix(SUFFIX), []).append(name)
    return groups


def find_files(path: Path) -> list[Path]:
    """Return the files of the model: the file `path` with its further parts, or those in the folder `path`.

    Returns none if `path` has no GGUF, or has safetensors. Raises ModelError for a folder with several models.
    """
    folder, is_file = (path.parent, True) if path.suffix == SUFFIX else (path, False)
    if not folder.is_dir() or (not is_file and any(folder.glob("*.safetensors"))):
        return []
    groups = group_files(list_names(folder))
    if is_file:
        groups = {model: names for model, names in groups.items() if path.name in names}
    if len(groups) > 1:
        raise ModelError(f"{folder} has several models, {', '.join(groups)[:500]}: name one file, or keep one there")
    return [folder / name for names in groups.values() for name in names]


def list_names(folder: Path) -> list[str]:
    """Return the GGUF files in the folder and in the folders within it, in which a hub has large ones in parts."""
    found = [*folder.glob(f"*{SUFFIX}"), *folder.glob(f"*/*{SUFFIX}")]
    return [path.relative_to(folder).as_posix() for path in found if path.is_file()]


def choose_files(title: str, names: Iterable[str], wanted: str) -> list[str]:
    """Return the files of one model. wanted: the name of a file, or its end as in `Q4_K_M`; "": the only model.

    Raises ModelError.
    """
    groups = group_files(names)
    word = wanted.lower().removesuffix(SUFFIX)
    for found in (
        [model for model in groups if model.rpartition("/")[2].lower() == word],
        [model for model in groups if not word or re.search(rf"(^|[-.]){re.escape(word)}$", model.lower())],
    ):
        if len(found) == 1:
            return groups[found[0]]
    models = ", ".join(sorted(groups))[:1000] or "none"
    if not wanted:
        raise ModelError(f"{title} has several GGUF models: add one to the URI, as in `:Q4_K_M`; it has {models}")
    raise ModelError(f"{title} has no single GGUF model that ends with {wanted!r}; it has {models}")
