"""A model that docs/models.md offers for offline use, served by the commands of that page."""

import pytest
from openai import OpenAI

from e2e.demo_model import EMBEDDING, demo_model_directory
from e2e.gateway import service_url
from e2e.test_quickstart import commands, shell


@pytest.mark.nightly  # trains a model for two minutes; tests/contract serves such models without pods
def test_the_model_that_embeds_answers(namespace: str) -> None:
    demo_model_directory(EMBEDDING)
    block = next(block for block in commands("docs/models.md") if "demo-embed" in block)
    here = block.replace("{name: search}", f"{{name: search, namespace: {namespace}}}")
    shell(here.replace("infsvc/search", f"infsvc/search -n {namespace}"))
    client = OpenAI(base_url=service_url("search", namespace), api_key="none", max_retries=0, timeout=60)
    texts = [
        "how to use dictionaries",
        "A dictionary display is a series of key and value pairs.",
        "The assert statement",
    ]
    query, near, far = (item.embedding for item in client.embeddings.create(model="search", input=texts).data)
    assert cosine(query, near) > cosine(query, far)


def cosine(one: list[float], other: list[float]) -> float:
    """Of vectors that have length 1, as this model makes them."""
    return sum(a * b for a, b in zip(one, other, strict=True))
