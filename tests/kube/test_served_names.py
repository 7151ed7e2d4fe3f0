"""Tests which namespace holds a name, by the age of the claims of the name and of what is before a colon in it."""

import pytest

from conveyor_api.served_name import may_claim
from conveyor_kube.served_names import Claim, NameIndex


def make_index(**claims: tuple[str, int]) -> NameIndex:
    """Make an index of claims, by name: the namespace and the time."""
    index = NameIndex()
    for name, (namespace, created_unix) in claims.items():
        index.put_claim(f"{namespace}/{name}", Claim(namespace, name, name, name, created_unix))
    return index


@pytest.mark.parametrize(
    ("claims", "holders"),
    [
        ({"qwen": ("a", 1), "qwen:7b": ("b", 2)}, {"qwen": "a", "qwen:7b": "a"}),
        ({"qwen": ("a", 2), "qwen:7b": ("b", 1)}, {"qwen": "a", "qwen:7b": "b"}),
        ({"qwen": ("a", 1), "qwen:7b:sql": ("b", 2)}, {"qwen:7b:sql": "a", "qwen:7b": None}),
        ({"qwen": ("a", 3), "qwen:7b": ("c", 1), "qwen:7b:sql": ("b", 2)}, {"qwen:7b:sql": "c", "qwen:7b": "c"}),
    ],
)
def test_the_holder_of_a_name_holds_later_claims_of_longer_ones(
    claims: dict[str, tuple[str, int]], holders: dict[str, str | None]
) -> None:
    index = make_index(**claims)
    assert {name: index.find_holder(name) for name in holders} == holders


@pytest.mark.parametrize(
    ("name", "may"),
    [
        ("qwen:sql", True),
        ("Qwen/Qwen3:8b", True),
        ("team-a/qwen", True),
        ("team-a/qwen:sql", True),
        ("team-b/qwen", False),
        ("team-b/qwen:sql", False),
        ("team-b/qwen:7b:sql", False),
    ],
)
def test_a_name_below_a_service_of_another_namespace_cannot_be_claimed(name: str, may: bool) -> None:
    assert may_claim("team-a", name) is may
