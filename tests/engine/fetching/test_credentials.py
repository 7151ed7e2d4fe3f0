"""Tests downloads with credentials from files: of a Secret of `secretRef`, and of other volumes."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.engine.fetching.buckets import URI, Server, check_access, make_user
from tests.engine.fetching.hubs import running_hub, start_fetch

from conveyor_engine.errors import ModelError
from conveyor_engine.fetching.fetch import MARKER, fetch
from conveyor_engine.fetching.preview import NO_TASK

HUB = "hf://org/tiny"
RIGHTS = ("s3:ListBucket", "s3:GetObject")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables, and restore them after the test."""
    for name in ("HF_TOKEN", "HF_TOKEN_PATH", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def mount(folder: Path, files: Mapping[str, str]) -> str:
    """Write a Secret's volume as the kubelet does: links to files in a folder that another link names."""
    (folder / "..now").mkdir(parents=True)
    (folder / "..data").symlink_to("..now")
    for name, content in files.items():
        (folder / "..now" / name).write_text(content)
        (folder / name).symlink_to(f"..data/{name}")
    return str(folder)


def test_a_token_in_a_file_opens_a_private_repository(
    monkeypatch: pytest.MonkeyPatch, root: Path, target: Path, tmp_path: Path
) -> None:
    with running_hub(root, token="secret") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        fetch(HUB, str(target), credentials=mount(tmp_path / "hub", {"HF_TOKEN": "secret\n"}), task=NO_TASK)
    assert (target / MARKER).exists()


def test_a_token_s_file_may_be_in_any_volume(root: Path, target: Path, tmp_path: Path) -> None:
    with running_hub(root, token="secret") as hub:
        absent = start_fetch(hub.url, HUB, target, HF_TOKEN_PATH=str(tmp_path / "token"))
        assert (
            f"HF_TOKEN_PATH names {tmp_path / 'token'}, which cannot be read: No such file" in absent.communicate()[1]
        )
        (tmp_path / "token").write_text("secret\n")
        present = start_fetch(hub.url, HUB, target, HF_TOKEN_PATH=str(tmp_path / "token"))
        assert "event=model_fetched" in present.communicate()[1]


def test_keys_in_files_open_a_bucket(
    monkeypatch: pytest.MonkeyPatch, server: Server, target: Path, tmp_path: Path
) -> None:
    user = make_user(server, *RIGHTS)
    check_access(monkeypatch)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    files = {"AWS_ACCESS_KEY_ID": user.key, "AWS_SECRET_ACCESS_KEY": user.secret, "AWS_ENDPOINT_URL": server.url}
    fetch(URI, str(target), credentials=mount(tmp_path / "bucket", files))
    assert (target / MARKER).exists()


def test_a_shared_credentials_file_may_be_in_any_volume(
    monkeypatch: pytest.MonkeyPatch, server: Server, target: Path, tmp_path: Path
) -> None:
    user = make_user(server, *RIGHTS)
    check_access(monkeypatch)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    file = tmp_path / "credentials"
    file.write_text(f"[default]\naws_access_key_id = {user.key}\naws_secret_access_key = {user.secret}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    fetch(URI, str(target))
    assert (target / MARKER).exists()


@pytest.mark.parametrize(
    ("uri", "files", "lacks"),
    [
        (HUB, {}, r"the key of secretRef.key \(token by default\)"),
        (URI, {}, "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        (URI, {"AWS_ACCESS_KEY_ID": "any"}, "AWS_SECRET_ACCESS_KEY"),
    ],
)
def test_a_missing_secret_or_key_is_reported_by_name(
    uri: str, files: Mapping[str, str], lacks: str, target: Path, tmp_path: Path
) -> None:
    message = f"^adapter sql: Secret team does not exist in this namespace, or lacks {lacks}$"
    with pytest.raises(ModelError, match=message) as caught:
        fetch(uri, str(target), adapter="sql", credentials=mount(tmp_path / "team", files))
    assert caught.value.reason == "SecretNotFound"


def test_what_is_no_text_is_reported_and_not_shown(target: Path, tmp_path: Path) -> None:
    folder = Path(mount(tmp_path / "team", {"HF_TOKEN": "hf_SECRET\0"}))
    with pytest.raises(ModelError, match="HF_TOKEN of Secret team has a NUL byte"):
        fetch(HUB, str(target), credentials=str(folder))
    (folder / "HF_TOKEN").write_bytes(b"hf_SECRET\xff")
    with pytest.raises(ModelError, match="HF_TOKEN of Secret team cannot be read: UnicodeDecodeError") as caught:
        fetch(HUB, str(target), credentials=str(folder))
    assert "SECRET" not in str(caught.value)
