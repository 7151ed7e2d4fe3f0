"""Tests that the pages about errors agree with the programs."""

import re

from conveyor_engine.errors import ErrorCode
from conveyor_gateway.errors import Code
from e2e.cluster.paths import REPOSITORY

STATUSES: dict[str, set[int]] = {}
for code in (*Code, *ErrorCode):
    STATUSES.setdefault(str(code), set()).add(code.status)

TROUBLESHOOTING = (REPOSITORY / "docs" / "troubleshooting.md").read_text()
TABLE = TROUBLESHOOTING.partition("## A client gets an error")[2].partition("\n## ")[0]
ROWS = re.findall(r"^\| (\d[^|]*)\|(.*)\|$", TABLE, re.MULTILINE)


def test_gateway_and_engine_answer_one_code_with_one_status() -> None:
    assert not {code: statuses for code, statuses in STATUSES.items() if len(statuses) > 1}


def test_a_code_on_a_page_is_one_that_is_answered_with_that_status() -> None:
    named = 0
    for statuses, cause in ROWS:
        for code in re.findall(r"`([a-z]+(?:_[a-z]+)+)`", statuses + cause):
            assert STATUSES[code] <= set(map(int, re.findall(r"\d{3}", statuses))), code
            named += 1
    assert named >= 6
    for page in ("openai-api", "models", "operations", "monitoring", "sizing", "autoscaling", "keda"):
        text = (REPOSITORY / "docs" / f"{page}.md").read_text()
        for status, code in re.findall(r"\b([45]\d\d) `([a-z_]+)`", text):
            assert STATUSES[code] == {int(status)}, f"{page}: {code}"


def test_every_status_that_a_client_may_get_is_on_the_page_of_what_to_do() -> None:
    listed = {int(status) for statuses, _ in ROWS for status in re.findall(r"\d{3}", statuses)}
    assert listed == set().union(*STATUSES.values())
