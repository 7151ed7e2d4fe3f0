"""The pages keep up with the parts, and with each other: metrics by which people alert, decisions, links."""

import asyncio
import re

from prometheus_client import REGISTRY, generate_latest

import conveyor_metrics.server  # noqa: F401  fills REGISTRY
from conveyor_engine.serving.metrics import EngineMetrics
from conveyor_gateway.memory import Memory
from conveyor_gateway.metrics import Metrics, StateCollector
from conveyor_gateway.queues import Queues
from conveyor_gateway.readiness import Readiness
from conveyor_operator.metrics import Metrics as OperatorMetrics
from e2e.cluster.paths import REPOSITORY

PAGES = [REPOSITORY / "docs" / f"{page}.md" for page in ("operations", "sizing", "troubleshooting", "autoscaling")]
_NAME = re.compile(r"\b(?:conveyor_(?:operator|gateway|metrics|engine)_|vllm:)\w+")


async def expose() -> str:
    """All four parts' /metrics, one after the other."""
    gateway = Metrics()
    queues = Queues(asyncio.get_running_loop(), on_gone=gateway.forget)
    gateway.registry.register(StateCollector(queues, Readiness([], 1), Memory(1)))
    pages = [gateway.render(), EngineMetrics("m").render()]
    pages += [generate_latest(registry) for registry in (REGISTRY, OperatorMetrics().registry)]
    return b"".join(pages).decode()


async def test_a_metric_that_a_page_names_is_exposed() -> None:
    exposed = set(re.findall(r"^# TYPE (\S+)", await expose(), re.MULTILINE))
    named = {name for page in PAGES for name in _NAME.findall(page.read_text())}
    assert len(named) > 30
    assert named <= exposed


def test_a_decision_has_a_number_of_its_own_and_says_it() -> None:
    pages = sorted((REPOSITORY / "docs" / "adr").glob("*.md"))
    assert [int(page.name[:4]) for page in pages] == list(range(1, len(pages) + 1))
    assert all(page.read_text().startswith(f"# {int(page.name[:4])}. ") for page in pages)


def test_a_link_to_a_page_of_the_project_leads_somewhere() -> None:
    pages = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#:]+\.md)", page.read_text())]
    assert len(links) > 30
    assert not [(page.name, link) for page, link in links if not (page.parent / link).is_file()]
