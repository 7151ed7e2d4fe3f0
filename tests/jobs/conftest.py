"""Ends the jobs of each test, also of one that failed."""

from collections.abc import Iterator

import pytest
from tests.jobs import running


@pytest.fixture(autouse=True)
def _no_job_is_left() -> Iterator[None]:
    yield
    for job in running.STARTED:
        if job.returncode is None:
            job.kill()
    running.STARTED.clear()
