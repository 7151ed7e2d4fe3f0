"""`kubectl conveyor models`: the families of text models that CI tests. For `command`."""

from collections.abc import Iterator
from typing import Final

from conveyor_protocol.families import FAMILIES, MEANINGS

DESCRIPTION: Final = """List the families of text models that Conveyor's engine is tested with, by the `model_type` in
their config.json, their tasks, and what the engine's own code computes of their layers. Other families may run too:
python -m conveyor_engine check MODEL says it of any model. The exit code is 1 if no family has the word."""


def list_families(word: str) -> Iterator[str]:
    """Yield a line for each family whose model_type or name contains the word, in any case."""
    for model_type, family in FAMILIES.items():
        if word.lower() in f"{model_type} {family.name}".lower():
            replaced = MEANINGS[family.replaced] if family.replaced else ""
            yield f"{model_type:<18}{family.name:<42}{', '.join(family.tasks):<36}{replaced}".rstrip()
