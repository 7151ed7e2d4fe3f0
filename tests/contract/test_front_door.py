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


def test_every_page_and_package_has_the_same_version() -> None:
    def find(file: str, pattern: str) -> str:
        found = re.search(pattern, (REPOSITORY / file).read_text(), re.MULTILINE)
        assert found, file
        return found[1]

    number = r"(\d+\.\d+\.\d+)"
    versions = {
        "pyproject.toml": find("pyproject.toml", rf'^version = "{number}"'),
        "chart": find("charts/conveyor/Chart.yaml", rf"^version: {number}$"),
        "images": find("charts/conveyor/Chart.yaml", rf'^appVersion: "{number}"$'),
        "README.md": find("README.md", rf"^Version {number} "),
        "CHANGELOG.md": find("CHANGELOG.md", rf"^## \[{number}\] - \d{{4}}-\d\d-\d\d$"),
        "docs/versioning.md": find("docs/versioning.md", rf"^The version is {number}, of \d{{4}}-\d\d-\d\d\."),
        "docs/comparison.md": find("docs/comparison.md", rf"Conveyor {number} \|"),
        "docs/install.md": find("docs/install.md", rf"conveyor/control:{number} "),
    }
    assert len(set(versions.values())) == 1, versions


def _leaves(value: object) -> list[object]:
    return [leaf for child in value.values() for leaf in _leaves(child)] if isinstance(value, dict) else [value]
