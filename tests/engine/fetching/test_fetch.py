"""Tests `fetch` with a hub that implements the real protocol."""

import json
import re
import shutil
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants
from tests.engine.fetching.hubs import NOWHERE, WEIGHTS, Fetch, partial_of, running_hub, start_fetch, write_repository

from conveyor_engine.errors import ModelError, StartError
from conveyor_engine.fetching.fetch import MARKER
from conveyor_engine.fetching.hub import has_one_origin
from e2e.cluster.certificates import Authority
from e2e.hub.repository import Repository
from e2e.hub.server import Hub

POOLING_FILES = (
    "modules.json", "sentence_bert_config.json", "1_Pooling/config.json", "config_sentence_transformers.json",
)  # fmt: skip


def test_only_what_the_engine_loads_is_fetched_and_marked(
    fetch_from: Fetch, hub: Hub, root: Path, target: Path
) -> None:
    fetch_from(hub.url, "hf://org/tiny", target)
    expected = {"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", WEIGHTS}
    assert {path.name for path in target.iterdir()} == expected | {MARKER}
    for name in expected:
        assert (target / name).read_bytes() == (root / "org/tiny" / name).read_bytes()
    revision = Repository(root, "org/tiny").find("main")
    assert revision is not None
    assert json.loads((target / MARKER).read_text())["commit"] == revision.commit
    assert [path.name for path in target.parent.iterdir() if path.name.endswith(".partial")] == []


def test_what_says_how_a_model_embeds_is_fetched_too(fetch_from: Fetch, hub: Hub, root: Path, target: Path) -> None:
    (root / "org/tiny/1_Pooling").mkdir()
    (root / "org/tiny/4_Dense").mkdir()
    for name in (*POOLING_FILES, "4_Dense/config.json", "1_Pooling/more.json"):
        (root / "org/tiny" / name).write_text(json.dumps({"name": name}))
    fetch_from(hub.url, "hf://org/tiny", target)
    fetch_from(NOWHERE, "hf://org/tiny", target)
    for name in POOLING_FILES:
        assert (target / name).read_bytes() == (root / "org/tiny" / name).read_bytes()
    assert [path.name for path in (target / "1_Pooling").iterdir()] == ["config.json"]
    assert not (target / "4_Dense").exists()
    (target / "1_Pooling/config.json").write_text("{}")
    fetch_from(hub.url, "hf://org/tiny", target)
    assert json.loads((target / "1_Pooling/config.json").read_text()) == {"name": "1_Pooling/config.json"}


def test_layers_behind_the_pooling_are_fetched_beside_the_weights(
    fetch_from: Fetch, hub: Hub, root: Path, target: Path
) -> None:
    """Only weights at the root are the model's."""
    folder = root / "org/tiny"
    (folder / WEIGHTS).rename(folder / "other.safetensors")
    for name in ("2_Dense/config.json", "2_Dense/model.safetensors", "1_LogitScore/config.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    fetch_from(hub.url, "hf://org/tiny", target)
    found = {path.relative_to(target).as_posix() for path in target.rglob("*.safetensors")}
    assert found == {"other.safetensors", "2_Dense/model.safetensors"}
    assert (target / "2_Dense/config.json").is_file()
    assert (target / "1_LogitScore/config.json").is_file()


def test_a_pooling_of_another_commit_is_not_kept(fetch_from: Fetch, hub: Hub, target: Path) -> None:
    partial = partial_of(target)
    (partial / "1_Pooling").mkdir()
    (partial / "1_Pooling/config.json").write_text("{}")
    fetch_from(hub.url, "hf://org/tiny", target)
    assert not (target / "1_Pooling/config.json").exists()


def test_what_an_older_engine_did_not_want_is_added_to_its_model(
    fetch_from: Fetch, hub: Hub, root: Path, target: Path
) -> None:
    (root / "org/tiny/1_Pooling").mkdir()
    for name in POOLING_FILES:
        (root / "org/tiny" / name).write_text(json.dumps({"name": name}))
    fetch_from(hub.url, "hf://org/tiny", target)
    _make_older(target)
    shutil.copytree(root / "org/tiny", root / "org/tiny/.revisions/before")
    (root / "org/tiny/tokenizer.json").write_text("of a later commit")
    fetch_from(NOWHERE, "hf://org/tiny", target)
    assert not (target / "modules.json").exists(), "it starts as it did, without a hub"
    weights = (target / WEIGHTS).stat().st_ino
    fetch_from(hub.url, "hf://org/tiny", target)
    for name in POOLING_FILES:
        assert (target / name).read_bytes() == (root / "org/tiny" / name).read_bytes()
    assert json.loads((target / "tokenizer.json").read_text()) == {"name": "tokenizer.json"}, "of the same commit"
    assert (target / WEIGHTS).stat().st_ino == weights, "what is there stays"
    fetch_from(NOWHERE, "hf://org/tiny", target)
    (target / "modules.json").unlink()
    fetch_from(hub.url, "hf://org/tiny", target)
    assert (target / "modules.json").exists(), "the marker names what was added"


def test_the_card_is_fetched_with_a_model_and_not_added_to_an_older_one(
    fetch_from: Fetch, hub: Hub, root: Path, target: Path
) -> None:
    fetch_from(hub.url, "hf://org/tiny", target)
    (root / "org/tiny/README.md").write_text("---\nbase_model: org/other\n---")
    fetch_from(NOWHERE, "hf://org/tiny", target)
    shutil.rmtree(target)
    fetch_from(hub.url, "hf://org/tiny", target)
    assert (target / "README.md").is_file()


def test_a_newer_engine_adds_to_a_program_only_what_it_reads(
    fetch_from: Fetch, hub: Hub, root: Path, target: Path
) -> None:
    folder = root / "org/program"
    write_repository(folder, weights_bytes=1024)
    for name in ("config.json", WEIGHTS):
        (folder / name).unlink()
    for name in ("model.pt2", "model.json"):
        (folder / name).write_text("{}")
    fetch_from(hub.url, "hf://org/program", target)
    names = {path.name for path in target.iterdir()}
    assert names == {"model.pt2", "model.json", MARKER}
    marker = json.loads((target / MARKER).read_text())
    (target / MARKER).write_text(json.dumps(marker | {"wanted": "fewer"}))
    fetch_from(hub.url, "hf://org/program", target)
    assert {path.name for path in target.iterdir()} == names


def _make_older(target: Path) -> None:
    """Make the directory like an older engine's, which fetched no pooling files and did not record what it wanted."""
    marker = json.loads((target / MARKER).read_text())
    del marker["wanted"]
    for name in POOLING_FILES:
        del marker["files"][name]
        (target / name).unlink()
    (target / "1_Pooling").rmdir()
    (target / MARKER).write_text(json.dumps(marker))


def test_a_complete_model_needs_no_hub(fetch_from: Fetch, hub: Hub, target: Path) -> None:
    fetch_from(hub.url, "hf://org/tiny", target)
    fetch_from(NOWHERE, "hf://org/tiny", target)


def test_a_model_that_lost_a_byte_is_fetched_again(fetch_from: Fetch, hub: Hub, root: Path, target: Path) -> None:
    fetch_from(hub.url, "hf://org/tiny", target)
    (target / WEIGHTS).write_bytes(b"short")
    fetch_from(hub.url, "hf://org/tiny", target)
    assert (target / WEIGHTS).read_bytes() == (root / "org/tiny" / WEIGHTS).read_bytes()


def test_a_revision_pins_the_commit(fetch_from: Fetch, hub: Hub, root: Path, target: Path) -> None:
    write_repository(root / "org/tiny/.revisions/v1", weights_bytes=1024)
    found = Repository(root, "org/tiny").find("v1")
    assert found is not None
    for name, revision in (("by-tag", "v1"), ("by-commit", found.commit)):
        fetch_from(hub.url, f"hf://org/tiny@{revision}", target / name)
        assert (target / name / WEIGHTS).stat().st_size == 1024
        assert json.loads((target / name / MARKER).read_text())["commit"] == found.commit
    assert all(f"/resolve/{found.commit}/" in r.path for r in hub.requests if "/resolve/" in r.path)


def test_weights_in_pieces_are_those_of_the_index(fetch_from: Fetch, hub: Hub, root: Path, target: Path) -> None:
    folder = root / "org/tiny"
    (folder / WEIGHTS).rename(folder / "model-1-of-2.safetensors")
    (folder / "model-2-of-2.safetensors").write_bytes(b"second")
    (folder / "consolidated.safetensors").write_bytes(b"the same again")
    pieces = {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": pieces}))
    fetch_from(hub.url, "hf://org/tiny", target)
    assert {path.name for path in target.glob("*.safetensors")} == set(pieces.values())


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json"])
def test_a_wrong_checksum_is_refused_and_the_file_deleted(
    fetch_from: Fetch, root: Path, target: Path, name: str
) -> None:
    with running_hub(root, corrupt=frozenset([name])) as hub:
        with pytest.raises(ModelError, match=name) as caught:
            fetch_from(hub.url, "hf://org/tiny", target)
        assert caught.value.reason == "ChecksumMismatch"
    assert not target.exists()
    assert not list(target.parent.rglob(f"{name}*"))
    with running_hub(root) as hub:
        fetch_from(hub.url, "hf://org/tiny", target)


@pytest.mark.parametrize(
    ("uri", "reason", "words"),
    [
        ("hf://org/none", "ModelNotFound", "org/none does not exist at http://127.0.0.1"),
        ("hf://org/tiny@v9", "ModelNotFound", "has no revision v9"),
        ("hf://org", "InvalidConfig", "neither hf://"),
        ("hf://org/../tiny", "InvalidConfig", "neither hf://"),
        ("gs://bucket/key", "InvalidConfig", "neither hf://"),
    ],
)
def test_what_cannot_be_found_is_said(
    fetch_from: Fetch, hub: Hub, target: Path, uri: str, reason: str, words: str
) -> None:
    with pytest.raises(StartError, match=re.escape(words)) as caught:
        fetch_from(hub.url, uri, target)
    assert caught.value.reason == reason


def test_a_hub_that_is_not_there_is_a_failed_download_in_the_termination_message(target: Path) -> None:
    process = start_fetch(NOWHERE, "hf://org/tiny", target)
    process.communicate(timeout=200)
    assert process.returncode == 1
    message = json.loads((target.parent.parent / "termination").read_text())
    assert message["reason"] == "ModelDownloadFailed"
    assert NOWHERE in message["message"]


def test_a_hub_that_never_answers_is_a_failed_download(
    monkeypatch: pytest.MonkeyPatch, fetch_from: Fetch, target: Path
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(ModelError, match="Timeout") as caught:
        fetch_from(f"http://127.0.0.1:{silent.getsockname()[1]}", "hf://org/tiny", target)
    assert caught.value.reason == "ModelDownloadFailed"


def test_a_token_opens_a_private_repository(fetch_from: Fetch, root: Path, target: Path) -> None:
    with running_hub(root, token="secret") as hub:
        for wrong in ("", "wrong"):
            with pytest.raises(ModelError, match="token") as caught:
                fetch_from(hub.url, "hf://org/tiny", target, token=wrong)
            assert caught.value.reason == "ModelNotFound"
        fetch_from(hub.url, "hf://org/tiny", target, token="secret")
    assert (target / MARKER).exists()


@pytest.mark.parametrize(
    "token", ["hf_SECRET\nhf_OTHER", "hf_SECRET and more", "\N{LEFT DOUBLE QUOTATION MARK}hf_SECRET"]
)
def test_an_invalid_token_is_reported_and_not_shown(fetch_from: Fetch, hub: Hub, target: Path, token: str) -> None:
    with pytest.raises(ModelError, match="HF_TOKEN is not one word") as caught:
        fetch_from(hub.url, "hf://org/tiny", target, token=token)
    assert "SECRET" not in str(caught.value)
    assert not hub.requests


def test_an_invalid_endpoint_is_reported_and_not_shown(fetch_from: Fetch, target: Path) -> None:
    with pytest.raises(ModelError, match="HF_ENDPOINT is not the URL") as caught:
        fetch_from("mirror:PASSWORD@127.0.0.1:9", "hf://org/tiny", target)
    assert "PASSWORD" not in str(caught.value)


def test_the_password_of_a_mirror_is_not_shown(fetch_from: Fetch, target: Path) -> None:
    with pytest.raises(ModelError, match=re.escape(f"at {NOWHERE} cannot be fetched")) as caught:
        fetch_from(NOWHERE.replace("//", "//mirror:PASSWORD@"), "hf://org/tiny", target)
    assert "PASSWORD" not in str(caught.value)


def test_the_hub_sees_only_requests_for_the_model(hub: Hub, target: Path) -> None:
    fetching = start_fetch(hub.url, "hf://org/tiny", target, HF_HUB_DISABLE_TELEMETRY="1")  # as the operator sets it
    _, log = fetching.communicate(timeout=60)
    assert fetching.returncode == 0, log
    wanted = re.compile(r"/api/models/org/tiny/(revision|tree)/[^/]+|/org/tiny/resolve/[0-9a-f]{40}/.+")
    assert hub.requests
    assert [request.path for request in hub.requests if not wanted.fullmatch(request.path)] == []


def test_the_token_does_not_leave_the_hub(fetch_from: Fetch, root: Path, target: Path) -> None:
    with running_hub(root) as storage, running_hub(root, token="secret", storage=storage.url) as hub:
        fetch_from(hub.url, "hf://org/tiny", target, token="secret")
    assert {request.authorization for request in hub.requests} == {"Bearer secret"}
    assert {request.authorization for request in storage.requests} == {None}


@pytest.mark.parametrize(
    "location", ["http://hub.example/file", "https://hub.example:8443/file", "https://cdn.hub.example/file"]
)
def test_the_token_is_for_one_scheme_host_and_port(location: str) -> None:
    assert has_one_origin("https://hub.example/org/tiny/file", "https://hub.example/elsewhere")
    assert not has_one_origin("https://hub.example/org/tiny/file", location)


def test_a_gated_repository_says_what_to_do(fetch_from: Fetch, root: Path, target: Path) -> None:
    with (
        running_hub(root, gated=frozenset(["org/tiny"])) as hub,
        pytest.raises(ModelError, match="accept its terms") as caught,
    ):
        fetch_from(hub.url, "hf://org/tiny", target)
    assert caught.value.reason == "ModelDownloadFailed"


def test_pickled_weights_are_refused(fetch_from: Fetch, hub: Hub, root: Path, target: Path) -> None:
    (root / "org/tiny" / WEIGHTS).unlink()
    with pytest.raises(ModelError, match=r"only pytorch_model\.bin, and pickles can run code") as caught:
        fetch_from(hub.url, "hf://org/tiny", target)
    assert caught.value.reason == "UnsupportedModel"


def test_a_claim_is_only_looked_at(fetch_from: Fetch, tmp_path: Path, target: Path) -> None:
    with pytest.raises(ModelError, match="no directory"):
        fetch_from(NOWHERE, "pvc://models/tiny", target)
    target.mkdir(parents=True)
    (target / "readme").touch()
    with pytest.raises(ModelError, match="it holds readme") as caught:
        fetch_from(NOWHERE, "pvc://models/tiny", target)
    assert caught.value.reason == "ModelNotFound"
    write_repository(tmp_path / "good")
    shutil.copy(tmp_path / "good" / "config.json", target)
    fetch_from(NOWHERE, "pvc://models/tiny", target)


def test_a_claim_that_cannot_be_read_is_said(fetch_from: Fetch, target: Path) -> None:
    target.parent.mkdir()
    name = "too-long-a-name" * 30
    with pytest.raises(ModelError, match="File name too long") as caught:
        fetch_from(NOWHERE, f"pvc://models/{name}", target.with_name(name))
    assert caught.value.reason == "ModelUnreadable"


def test_a_target_that_cannot_be_written_is_said(fetch_from: Fetch, hub: Hub, target: Path) -> None:
    target.parent.mkdir()
    target.with_name(".tiny.partial").write_text("a file in the way")
    with pytest.raises(ModelError, match="cannot write") as caught:
        fetch_from(hub.url, "hf://org/tiny", target)
    assert caught.value.reason == "ModelDownloadFailed"


def test_the_hub_runs_as_a_process(fetch_from: Fetch, root: Path, target: Path) -> None:
    command = [sys.executable, "-m", "e2e.hub", "--root", str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        fetch_from(first.strip().partition("url=")[2], "hf://org/tiny", target)
        process.terminate()
        assert process.wait(timeout=30) == 0


def test_a_hub_whose_certificate_is_of_ones_own_authority(
    fetch_from: Fetch, hub: Hub, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path / "authority", "authority")
    pair = authority.issue("hub", "hub", names=["127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    hub.socket = context.wrap_socket(hub.socket, server_side=True)
    url = hub.url.replace("http:", "https:")
    with pytest.raises(ModelError, match="CERTIFICATE_VERIFY_FAILED"):
        fetch_from(url, "hf://org/tiny", target)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
    fetch_from(url, "hf://org/tiny", target)
    assert (target / WEIGHTS).exists()
