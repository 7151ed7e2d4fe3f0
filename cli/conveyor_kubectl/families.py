"""`kubectl conveyor models`: the families of models that CI tests. For `command`."""

from collections.abc import Iterator
from typing import Final

from conveyor_protocol.families import FAMILIES, MEANINGS, PIPELINES, VECTORS

DESCRIPTION: Final = """List the families of text models that Conveyor's engine is tested with, by the `model_type` in
their config.json, their tasks, and what the engine's own code computes of their layers. Models with sparse vectors or
vectors of tokens follow, with the families of their encoders, and then the pipelines that make pictures, by the class
in their model_index.json. Other families may run too:
python -m conveyor_engine check MODEL says it of any model. The exit code is 1 if no family has the word."""


def list_families(word: str) -> Iterator[str]:
    """Yield a line for each family or pipeline whose name contains the word, in any case."""
    for model_type, family in FAMILIES.items():
        if word.lower() in f"{model_type} {family.name}".lower():
            replaced = MEANINGS[family.replaced] if family.replaced else ""
            yield _row(model_type, family.name, ", ".join(family.tasks), replaced)
    for name, kind in VECTORS.items():
        if word.lower() in name.lower():
            yield _row(", ".join(kind.families), name, "Embed", ", ".join(kind.paths))
    for pipeline, name in PIPELINES.items():
        if word.lower() in f"{pipeline} {name}".lower():
            yield _row(pipeline, name, "ImageGenerate", "")


def _row(name: str, title: str, tasks: str, replaced: str) -> str:
    return f"{name:<27}{title:<42}{tasks:<36}{replaced}".rstrip()
