"""Tests that pages agree with the programs and with each other: metrics for alerts, decisions, and paths."""

import asyncio
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import REGISTRY, generate_latest
from tests.gateway.builders import NeverAsked

import conveyor_metrics.server  # noqa: F401  fills REGISTRY
from conveyor_engine.serving.metrics import EngineMetrics
from conveyor_gateway.admission.queues import Queues
from conveyor_gateway.capacity.ledger import Ledger
from conveyor_gateway.recording.gauges import ServiceGauges, StateCollector
from conveyor_gateway.recording.metrics import Metrics
from conveyor_gateway.watching.catalog import Catalog
from conveyor_gateway.watching.readiness import Readiness
from conveyor_operator.metrics import Metrics as OperatorMetrics
from e2e.cluster.paths import REPOSITORY

PAGES = [
    REPOSITORY / "docs" / f"{page}.md"
    for page in ("operations", "monitoring", "sizing", "troubleshooting", "autoscaling", "keda")
]
WALKS = [REPOSITORY / "docs" / f"{page}.md" for page in ("engine", "operator")]
MAPS = [*WALKS, *(REPOSITORY / "docs" / f"{page}.md" for page in ("architecture", "adding"))]
_NAME = re.compile(r"\b(?:conveyor_(?:operator|gateway|metrics|engine)_|vllm:)\w+")


async def expose() -> str:
    """Return the /metrics pages of all four programs, one after the other."""
    gateway = Metrics()
    catalog = Catalog()
    queues = Queues(catalog, asyncio.get_running_loop(), NeverAsked(), Ledger(1), on_gone=gateway.drop_service)
    gateway.gauges = ServiceGauges(queues)
    gateway.registry.register(StateCollector(catalog, Readiness([]), Ledger(1)))
    pages = [*gateway.write_page(), EngineMetrics("m").render()]
    pages += [generate_latest(registry) for registry in (REGISTRY, OperatorMetrics().registry)]
    return b"".join(pages).decode()


async def test_a_metric_that_a_page_names_is_exposed() -> None:
    types = re.findall(r"^# TYPE (\S+) (\w+)", await expose(), re.MULTILINE)
    exposed = {name for name, _ in types}
    exposed |= {f"{name}_{part}" for name, kind in types if kind == "histogram" for part in ("bucket", "sum", "count")}
    chart = REPOSITORY / "charts" / "conveyor"
    files = (*PAGES, chart / "alerts.yaml", chart / "dashboards" / "conveyor.json")
    named = {name for page in files for name in _NAME.findall(page.read_text())}
    assert len(named) > 30
    assert named <= exposed


def test_a_decision_has_a_number_of_its_own_and_says_it() -> None:
    pages = sorted((REPOSITORY / "docs" / "adr").glob("0*.md"))
    numbers = [int(page.name[:4]) for page in pages]
    assert len(numbers) == len(set(numbers)) > 30
    assert all(page.read_text().startswith(f"# {int(page.name[:4])}. ") for page in pages)


def test_a_decision_has_its_status_and_date_below_its_title() -> None:
    pages = sorted((REPOSITORY / "docs" / "adr").glob("0*.md"))
    lines = {page.name: page.read_text().splitlines()[2] for page in pages}
    status = re.compile(r"Accepted, \d{4}-\d\d-\d\d(?:; changed by \[\d+\]\(.*\))?\.")
    assert not [f"{name}: {line}" for name, line in lines.items() if not status.fullmatch(line)]


def test_the_index_lists_each_decision_once_with_its_title() -> None:
    folder = REPOSITORY / "docs" / "adr"
    listed = re.findall(r"^- \[(.+)\]\((.+)\)$", (folder / "README.md").read_text(), re.MULTILINE)
    titles = {page.name: page.read_text().partition("\n")[0].removeprefix("# ") for page in folder.glob("0*.md")}
    assert {name: title for title, name in listed} == titles
    assert len(listed) == len(titles)


def test_each_page_has_its_place_in_the_site() -> None:
    site = tomllib.loads((REPOSITORY / "zensical.toml").read_text())
    listed = re.findall(r"[\w./-]+\.md", str(site["project"]["nav"]))
    assert sorted(listed) == sorted([*(page.name for page in (REPOSITORY / "docs").glob("*.md")), "adr/README.md"])


def find_paths(page: Path) -> Iterator[tuple[str, str]]:
    """Yield each line of a page that has a path. A path may be relative to the folder in the heading above it."""
    folder = Path()
    for line in page.read_text().splitlines():
        named = re.findall(r"`([\w.-]+(?:/[\w.-]+)*/|(?:[\w.-]+/)*[\w-]+\.(?:py|md|c|h|yaml|toml))`", line)
        if line.startswith("#"):
            folder = Path(named[0]) if named else Path()
        for path in named:
            yield line, path if (REPOSITORY / path).exists() else str(folder / path)


@pytest.mark.parametrize("page", MAPS, ids=lambda page: page.stem)
def test_a_file_that_a_page_names_is_there(page: Path) -> None:
    paths = {path for _, path in find_paths(page)}
    assert paths
    assert not [path for path in paths if not (REPOSITORY / path).exists()]


@pytest.mark.parametrize("page", WALKS, ids=lambda page: page.stem)
def test_a_walk_enters_each_file_at_most_twice(page: Path) -> None:
    steps = Counter(path for line, path in find_paths(page) if re.match(r"\d+\. |   ", line))
    assert len(steps) > 30
    assert not {path: count for path, count in steps.items() if count > 2}
