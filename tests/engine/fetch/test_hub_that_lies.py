"""`fetch` against a hub that does not keep what it promised, or promises what cannot be."""

from pathlib import Path

import pytest
from tests.engine.fetch.hubs import WEIGHTS, Fetch, files_no_larger_than, running_hub

from conveyor_engine.errors import ModelError


def test_no_more_is_written_than_was_promised(fetch_from: Fetch, root: Path, target: Path) -> None:
    size = (root / "org/tiny" / WEIGHTS).stat().st_size
    with running_hub(root, repeated=frozenset([WEIGHTS])) as hub:
        with files_no_larger_than(size), pytest.raises(ModelError, match=WEIGHTS) as caught:
            fetch_from(hub.url, "hf://org/tiny", target)
        assert caught.value.reason == "ChecksumMismatch"
    with running_hub(root) as hub:
        fetch_from(hub.url, "hf://org/tiny", target)
