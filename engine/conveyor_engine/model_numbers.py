"""Checks the numbers in a model's config.json before anything is built from them. Called by `__main__`.

If a number is too large, building the model could take hours or all memory. The limits are several times the numbers
of any published model.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from conveyor_engine.errors import ModelError
from conveyor_engine.model_files import read_object

SIZE_MAX: Final = 2**24  # the largest vocabulary, context or layer width
COUNT_MAX: Final = 2**12  # the most layers or experts
_MODULES_MAX: Final = 2**16  # the most layers times experts
_COUNT = re.compile(r"(?:num|n)_(?:\w+_)?(?:layers?|blocks?|experts?)|(?:\w+_)?layers|(?:\w+_)?depth")
_SIZE = re.compile(
    r"(?:num|n)_\w*(?:heads?|groups|embd|ctx|inner|labels|positions)|\w+_(?:size|dim|positions|embeddings|rank|width)"
    r"|max_seq_len|max_sequence_length|seq_length|dim"
)
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def check_numbers(directory: Path) -> None:
    """Raise ModelError for the first number beyond its limit. Does nothing if there is no config.json."""
    config = read_object(directory / "config.json")
    try:
        numbers = list(_walk(config, ""))
    except RecursionError:
        raise ModelError(f"{directory / 'config.json'} cannot be read: it is nested too deeply") from None
    for path, value in numbers:
        name = path.rpartition(".")[2]
        most = COUNT_MAX if _COUNT.fullmatch(name) else SIZE_MAX if _SIZE.fullmatch(name) else None
        if most is not None and not -most <= value <= most:
            raise ModelError(f"{directory / 'config.json'}: {path} is {str(value)[:40]}, and may be {most} at most")
    for part in (config, config.get("text_config")):
        if isinstance(part, dict) and (modules := _largest(part, _LAYERS) * _largest(part, _EXPERTS)) > _MODULES_MAX:
            what = f"layers times experts are {modules}, and may be {_MODULES_MAX} at most"
            raise ModelError(f"{directory / 'config.json'}: {what}")


def _walk(content: dict[str, Any], above: str) -> Iterator[tuple[str, float]]:
    for key, value in content.items():
        path = f"{above}{key}"
        if isinstance(value, dict):
            yield from _walk(value, f"{path}.")
        elif isinstance(value, int | float):
            yield path, value


def _largest(part: dict[str, Any], names: tuple[str, ...]) -> int:
    return max((value for name in names if isinstance(value := part.get(name), int)), default=1)
