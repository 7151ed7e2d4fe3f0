"""Tests the pages that a newcomer reads first: README.md, docs/index.md (generated from it) and docs/quickstart.md."""

import re

import pytest
import yaml

from e2e.cluster.paths import REPOSITORY

_PAGES = ("README.md", "docs/index.md", "docs/quickstart.md")


@pytest.mark.parametrize("page", _PAGES)
def test_a_first_service_is_the_example(page: str) -> None:
    shown = re.search(r"```yaml\n(.*?)```", (REPOSITORY / page).read_text(), re.DOTALL)
    assert shown
    comment, _, example = (REPOSITORY / "examples/qwen.yaml").read_text().partition("\n")
    assert comment.startswith("# ")
    assert shown[1] == example


def test_a_first_service_has_five_fields() -> None:
    spec = yaml.safe_load((REPOSITORY / "examples/qwen.yaml").read_text())["spec"]
    assert len(list(_leaves(spec))) == 5


def test_the_site_opens_with_the_readme() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    assert (REPOSITORY / "docs/index.md").read_text() == readme.replace("](docs/", "](")
    outside = [link for link in re.findall(r"\]\(([^)]+)\)", readme) if not link.startswith("docs/")]
    assert not outside, "links of the README must lead to pages of docs/, or the site breaks"


def _leaves(value: object) -> list[object]:
    return [leaf for child in value.values() for leaf in _leaves(child)] if isinstance(value, dict) else [value]
