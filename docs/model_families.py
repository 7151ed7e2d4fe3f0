"""Prints model-families.md, the families of text models that CI tests: `python docs/model_families.py`.

Called by `make generate`, and by `make check-generated`, which compares.
"""

from collections.abc import Iterator

from conveyor_protocol.families import FAMILIES, MEANINGS, PIPELINES, VECTORS

_HEAD = """\
# Families of text models

Written by `make generate` from the table that the tests use; do not edit. [Supported models](models.md) explains what
the engine needs of a model, and has the models of images and of speech.

The engine runs these families and others. For each family below, a small random model is compared with transformers on
each change: the tokens that it generates, or its vectors and scores. `model_type` is the field in `config.json`.

The last column is the largest part of a decoder layer that the engine's own code computes on a CPU when the model
generates. All other parts run transformers' code. A published model may have settings that keep more of that code.
`python -m conveyor_engine check MODEL` and `kubectl conveyor models` show the same table.

| `model_type` | family | tasks | computed by the engine's own code |
| --- | --- | --- | --- |
"""

_VECTORS = """
## Sparse vectors and vectors of tokens
These models run with the task Embed ([how](token-embeddings.md)). A small random model of each family is compared with
its definition.

| models | recognised by | paths | tested with the families |
| --- | --- | --- | --- |
"""

_PIPELINES = """
## Models that generate images
These pipelines of diffusers run with the task ImageGenerate
([requirements](models.md#models-that-generate-images)). A small random model of each is compared with its pipeline.

| class in `model_index.json` | models |
| --- | --- |
"""


def page() -> Iterator[str]:
    yield _HEAD
    for model_type, family in FAMILIES.items():
        replaced = MEANINGS[family.replaced] if family.replaced else ""
        yield f"| `{model_type}` | {family.name} | {', '.join(family.tasks)} | {replaced} |\n"
    yield _VECTORS
    for name, kind in VECTORS.items():
        paths, families = (", ".join(f"`{each}`" for each in row) for row in (kind.paths, kind.families))
        yield f"| {name} | {kind.files} | {paths} | {families} |\n"
    yield _PIPELINES
    for pipeline, name in PIPELINES.items():
        yield f"| `{pipeline}` | {name} |\n"


if __name__ == "__main__":
    print("".join(page()), end="")
