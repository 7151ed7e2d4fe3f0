"""Chooses the files of a LoRA adapter in PEFT's format. Used by `fetch` and `mounted`.

Other files in such a folder, such as a tokenizer or a README, are left out: the engine uses the model's own.
"""

from collections.abc import Collection
from typing import Final

from conveyor_engine.errors import ModelError
from conveyor_engine.fetching.source import RemoteFile, RemoteModel

ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
_PICKLES: Final = (".bin", ".pt", ".pth")


def choose_adapter_files(model: RemoteModel) -> list[RemoteFile]:
    """Return the files that the engine loads. Raises ModelError if one is missing."""
    by_name = {file.name: file for file in model.files}
    if problem := find_problem(by_name):
        raise ModelError(f"{model} {problem}")
    return [by_name[ADAPTER_CONFIG], by_name[ADAPTER_WEIGHTS]]


def find_problem(names: Collection[str]) -> str:
    """Return why a folder with these files is no adapter that the engine can load; "" if it is one."""
    if ADAPTER_CONFIG not in names:
        return f"has no {ADAPTER_CONFIG}, so it is no adapter in PEFT's format"
    if ADAPTER_WEIGHTS in names:
        return ""
    pickles = sorted(name for name in names if name.endswith(_PICKLES))
    found = f", only {', '.join(pickles)}, and pickles can run code when they are loaded" if pickles else ""
    return f"has no {ADAPTER_WEIGHTS}{found}"
