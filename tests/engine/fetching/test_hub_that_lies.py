"""Tests `fetch` with a hub that sends other bytes than it announces, or announces impossible sizes."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.engine.fetching.hubs import INDEX, WEIGHTS, Fetch, files_no_larger_than, running_hub

from conveyor_engine.errors import ModelError


def test_no_more_is_written_than_was_promised(fetch_from: Fetch, root: Path, target: Path) -> None:
    size = (root / "org/tiny" / WEIGHTS).stat().st_size
    with running_hub(root, repeated=frozenset([WEIGHTS])) as hub:
        with files_no_larger_than(size), pytest.raises(ModelError, match=WEIGHTS) as caught:
            fetch_from(hub.url, "hf://org/tiny", target)
        assert caught.value.reason == "ChecksumMismatch"
    with running_hub(root) as hub:
        fetch_from(hub.url, "hf://org/tiny", target)


@pytest.mark.slow
def test_less_than_was_promised_is_reported_and_does_not_stay(fetch_from: Fetch, root: Path, target: Path) -> None:
    size = (root / "org/tiny" / WEIGHTS).stat().st_size
    with running_hub(root, short=frozenset([WEIGHTS])) as hub:
        for _ in "again":
            with pytest.raises(ModelError, match=f"{WEIGHTS} .* has {size // 2} bytes .* {size} bytes") as caught:
                fetch_from(hub.url, "hf://org/tiny", target)
            assert caught.value.reason == "ChecksumMismatch"
    with running_hub(root) as hub:
        fetch_from(hub.url, "hf://org/tiny", target)


CONFIG = {"rfilename": "config.json", "size": 12, "blobId": "0" * 40}


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"siblings": [CONFIG | {"size": "12"}]}, "no size or no digest of config"),
        ({"siblings": [CONFIG | {"size": -1}]}, "no size or no digest of config"),
        ({"siblings": [CONFIG | {"blobId": "/../../../x"}]}, "no size or no digest of config"),
        ({"siblings": [CONFIG | {"blobId": 7}]}, "cannot be fetched"),
        ({"siblings": [CONFIG | {"rfilename": 7}]}, "cannot be fetched"),
        ({"sha": "main\nevent=model_fetched"}, "which commit main is"),
    ],
)
def test_a_description_that_cannot_be_is_a_failed_download(
    fetch_from: Fetch, root: Path, target: Path, info: dict[str, object], words: str
) -> None:
    with running_hub(root, info=info) as hub, pytest.raises(ModelError, match=words) as caught:
        fetch_from(hub.url, "hf://org/tiny", target)
    assert caught.value.reason == "ModelDownloadFailed"


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ('{"weight_map": {"a": "pytorch_model.bin"}}', "names 'pytorch_model.bin', which is no safetensors file"),
        ('{"weight_map": {"a": 7}}', "names 7, which is no safetensors file"),
        ('{"weight_map": {"a": []}}', "which is no safetensors file"),
        ("[]", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_an_index_names_safetensors_and_nothing_else(
    fetch_from: Fetch, root: Path, target: Path, index: str, words: str
) -> None:
    (root / "org/tiny" / INDEX).write_text(index)
    with running_hub(root) as hub, pytest.raises(ModelError, match=words) as caught:
        fetch_from(hub.url, "hf://org/tiny", target)
    assert caught.value.reason == "UnsupportedModel"
    assert not any("pytorch_model" in request.path for request in hub.requests)


def test_redirects_without_end_are_a_failed_download(fetch_from: Fetch, root: Path, target: Path) -> None:
    with running_hub(root) as hub:
        hub.faults = replace(hub.faults, storage=hub.url)  # each redirect leads to the next
        with pytest.raises(ModelError, match="cannot be fetched: TooManyRedirects") as caught:
            fetch_from(hub.url, "hf://org/tiny", target)
    assert caught.value.reason == "ModelDownloadFailed"
    assert len(hub.requests) < 100
