"""Tests hubs and buckets that send too slowly, too much, or names outside the folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine.fetching.buckets import BUCKET, URI, Server
from tests.engine.fetching.hubs import WEIGHTS, Fetch, running_hub

from conveyor_engine.errors import ModelError
from conveyor_engine.fetching import bounds, bucket
from conveyor_engine.fetching import fetch as fetch_module
from conveyor_engine.fetching import hub as hub_module
from conveyor_engine.fetching.bounds import WINDOW_SECONDS, TooSlow, limit_chunks
from conveyor_engine.fetching.bucket import Bucket
from conveyor_engine.fetching.fetch import fetch
from conveyor_engine.fetching.source import RemoteFile, RemoteModel
from e2e.hub.server import Hub

OUTSIDE = [
    "../../evil.safetensors",
    "/tmp/evil.safetensors",
    "a/../../evil.safetensors",
    "..\\evil.safetensors",
    "evil\u202e.safetensors",
    f"{'evil' * 60}.safetensors",
    f"{'模' * 70}evil.safetensors",
]


class Clock:
    """Virtual time, which advances while a source is asked for a chunk."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def send(self, chunks: list[bytes], seconds: float) -> Iterator[bytes]:
        for chunk in chunks:
            self.now += seconds
            yield chunk


def test_a_byte_a_second_is_too_slow() -> None:
    clock = Clock()
    with pytest.raises(TooSlow, match="hub is too slow: it has sent 60 bytes in 60 s") as caught:
        list(limit_chunks(clock.send([b"x"] * 10_000, 1), "hub", clock=clock))
    assert clock.now == WINDOW_SECONDS
    assert caught.value.reason == "ModelDownloadFailed"


def test_a_slow_line_is_no_drip_and_a_drip_may_begin_late() -> None:
    clock, slow, drip = Clock(), [bytes(2048)] * 600, [b"x"] * 600
    assert list(limit_chunks(clock.send(slow, 1), "hub", clock=clock)) == slow
    with pytest.raises(TooSlow):
        list(limit_chunks(clock.send(slow + drip, 1), "hub", clock=clock))


def test_the_time_in_which_a_chunk_is_written_is_not_the_source_s() -> None:
    clock, num_chunks = Clock(), 0
    for _ in limit_chunks(clock.send([bytes(1000)] * 100, 0.1), "hub", clock=clock):
        clock.now += 2 * WINDOW_SECONDS
        num_chunks += 1
    assert num_chunks == 100


def make_all_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "WINDOW_SECONDS", 0)
    monkeypatch.setattr(bounds, "MIN_BYTES", 1 << 40)


@pytest.mark.parametrize("of_file", [False, True], ids=["listing", "file"])
def test_a_hub_that_is_too_slow_is_queried_once(
    monkeypatch: pytest.MonkeyPatch, fetch_from: Fetch, hub: Hub, target: Path, of_file: bool
) -> None:
    describe = hub_module.Hub.describe

    def describe_first(self: hub_module.Hub, commit: str | None = None) -> object:
        model = describe(self, commit)
        make_all_too_slow(monkeypatch)
        return model

    if of_file:
        monkeypatch.setattr(hub_module.Hub, "describe", describe_first)
    else:
        make_all_too_slow(monkeypatch)
    with pytest.raises(ModelError, match=f"{hub.url} is too slow") as caught:
        fetch_from(hub.url, "hf://org/tiny", target)
    assert caught.value.reason == "ModelDownloadFailed"
    gets = [request.path for request in hub.requests if request.method == "GET"]
    assert ["/resolve/" in path for path in gets] == [False, True][: len(gets)]
    assert len(gets) == 1 + of_file


@pytest.mark.parametrize("of_file", [False, True], ids=["listing", "file"])
def test_a_bucket_that_is_too_slow_is_queried_once(
    monkeypatch: pytest.MonkeyPatch, server: Server, target: Path, of_file: bool
) -> None:
    describe = Bucket.describe

    def describe_first(self: Bucket, commit: str | None = None) -> object:
        model = describe(self, commit)
        make_all_too_slow(monkeypatch)
        return model

    if of_file:
        monkeypatch.setattr(Bucket, "describe", describe_first)
    else:
        make_all_too_slow(monkeypatch)
    with pytest.raises(ModelError, match=f"{server.url} is too slow") as caught:
        fetch(URI, str(target))
    assert caught.value.reason == "ModelDownloadFailed"
    assert len([range for _, _, range in server.requests if range]) == of_file


def test_cuts_that_bring_a_byte_each_have_an_end(tmp_path: Path) -> None:
    class Cutting:
        num_requests = 0

        def describe(self, commit: str | None = None) -> RemoteModel:
            raise NotImplementedError

        def download(self, model: RemoteModel, file: RemoteFile, path: Path) -> None:
            self.num_requests += 1
            with path.open("ab") as content:
                content.write(b"x")
            raise bounds.failed("the connection was cut")

    source, file = Cutting(), RemoteFile(WEIGHTS, 1 << 30, "0" * 64, "sha256")
    with pytest.raises(ModelError, match="was cut"):
        fetch_module._download(source, RemoteModel("tiny", "0" * 40, (file,)), file, tmp_path / "unfinished")
    assert 1 < source.num_requests < 100


def test_a_listing_has_bounds(monkeypatch: pytest.MonkeyPatch, fetch_from: Fetch, hub: Hub, target: Path) -> None:
    monkeypatch.setattr(hub_module, "MAX_FILES", 3)
    with pytest.raises(ModelError, match="org/tiny has more than 3 files"):
        fetch_from(hub.url, "hf://org/tiny", target)
    monkeypatch.setattr(hub_module, "MAX_ANSWER_BYTES", 1 << 10)
    with pytest.raises(ModelError, match="sends an answer of more than") as caught:
        fetch_from(hub.url, "hf://org/tiny", target)
    assert caught.value.reason == "ModelDownloadFailed"


def test_a_bucket_s_listing_has_bounds(monkeypatch: pytest.MonkeyPatch, server: Server, target: Path) -> None:
    monkeypatch.setattr(bucket, "MAX_ANSWER_BYTES", 1 << 10)
    with pytest.raises(ModelError, match="sends an answer of more than") as caught:
        fetch(URI, str(target))
    assert caught.value.reason == "ModelDownloadFailed"


def test_a_bucket_that_lists_more_than_requested_is_refused(
    monkeypatch: pytest.MonkeyPatch, server: Server, target: Path
) -> None:
    files = b"".join(b"<Contents><Key>teams/a/tiny/%d</Key></Contents>" % number for number in range(4))
    server.replaced = (rb"(?s)<Name>.*</Contents>", files)
    monkeypatch.setattr(bucket, "MAX_FILES", 3)
    with pytest.raises(ModelError, match="more than 3 files"):
        fetch(URI, str(target))


def test_a_compressed_answer_is_not_read(fetch_from: Fetch, root: Path, target: Path) -> None:
    with running_hub(root, compressed=True) as hub, pytest.raises(ModelError, match="compresses its answers") as caught:
        fetch_from(hub.url, "hf://org/tiny", target)
    assert caught.value.reason == "ModelDownloadFailed"


@pytest.mark.parametrize("name", [*OUTSIDE, "evil\0.safetensors", ".", ".."], ids=ascii)
def test_a_name_that_leads_outside_is_never_fetched(fetch_from: Fetch, root: Path, target: Path, name: str) -> None:
    config = {"rfilename": "config.json", "size": 12, "blobId": "0" * 40}
    siblings = [config, config | {"rfilename": name}]
    with running_hub(root, info={"siblings": siblings}) as hub, pytest.raises(ModelError, match="no safetensors"):
        fetch_from(hub.url, "hf://org/tiny", target)
    assert not [request.path for request in hub.requests if "/resolve/" in request.path]


@pytest.mark.parametrize("name", [*OUTSIDE, ".", ".."], ids=ascii)
def test_a_key_that_leads_outside_is_never_fetched(server: Server, target: Path, name: str) -> None:
    client = server.client()
    client.delete_object(Bucket=BUCKET, Key=f"teams/a/tiny/{WEIGHTS}")
    client.put_object(Bucket=BUCKET, Key=f"teams/a/tiny/{name}", Body=b"x")
    with pytest.raises(ModelError, match="no safetensors"):
        fetch(URI, str(target))
    assert not [range for _, path, range in server.requests if range]


@pytest.mark.parametrize("member", ["ETag", "Size", "Key"])
def test_a_listing_without_a_member_is_a_failed_download(server: Server, target: Path, member: str) -> None:
    server.replaced = (f"<{member}>.*?</{member}>".encode(), b"")
    with pytest.raises(ModelError, match="cannot be fetched") as caught:
        fetch(URI, str(target))
    assert caught.value.reason == "ModelDownloadFailed"
