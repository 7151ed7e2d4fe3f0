"""Checks the numbers in a model's config.json before anything is built from them. Called by `__main__`.

Parts of pipelines have numbers of other names, which `tasks.imagegenerate` checks.

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
_COUNT = re.compile(r"(?:num|n)_(?:\w+_)?(?:layers?|blocks?|experts?)|(?:\w+_)?layers|(?:\w+_)?depths?")
_SIZE = re.compile(
    r"(?:num|n)_\w*(?:heads?|groups|embd|ctx|inner|labels|positions)"
    r"|\w+_(?:sizes?|dims?|positions|embeddings|ranks?|widths?|channels?)"
    r"|max_seq_len|max_sequence_length|seq_length|dims?|widths?|channels"
)
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def check_numbers(directory: Path) -> None:
    """Raise ModelError for the first number beyond its limit. Does nothing if there is no config.json."""
    config = read_object(directory / "config.json")
    for path, value in read_numbers(directory / "config.json"):
        name = path.rpartition(".")[2]
        if isinstance(value, list):
            if not name.endswith("depths") or not all(isinstance(each, int) for each in value):
                continue
            value = sum(map(abs, value))  # layers of all stages
        most = COUNT_MAX if _COUNT.fullmatch(name) else SIZE_MAX if _SIZE.fullmatch(name) else None
        if most is not None and not -most <= value <= most:
            raise ModelError(f"{directory / 'config.json'}: {path} is {str(value)[:40]}, and may be {most} at most")
    for part in (config, config.get("text_config")):
        if isinstance(part, dict) and (modules := _largest(part, _LAYERS) * _largest(part, _EXPERTS)) > _MODULES_MAX:
            what = f"layers times experts are {modules}, and may be {_MODULES_MAX} at most"
            raise ModelError(f"{directory / 'config.json'}: {what}")


def read_numbers(path: Path) -> list[tuple[str, Any]]:
    """Return each number and each list in a JSON object, with its place such as `text_config.num_layers`.

    The numbers in a list have the place of the list. Raises ModelError.
    """
    try:
        return list(_walk("", read_object(path)))
    except RecursionError:
        raise ModelError(f"{path} cannot be read: it is nested too deeply") from None


def _walk(place: str, value: object) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _walk(f"{place}.{name}" if place else name, inner)
    elif isinstance(value, list):
        yield place, value
        for each in value:
            yield from _walk(place, each)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield place, value


def _largest(part: dict[str, Any], names: tuple[str, ...]) -> int:
    return max((value for name in names if isinstance(value := part.get(name), int)), default=1)
