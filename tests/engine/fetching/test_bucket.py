"""Tests `fetch` of `s3://` with a server that implements S3's protocol, with signatures, parts and ETags."""

import json
import os
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from tests.engine.fetching.buckets import (
    BUCKET,
    PART_BYTES,
    URI,
    Server,
    check_access,
    make_user,
    set_keys,
    upload_parts,
)
from tests.engine.fetching.hubs import INDEX, NOWHERE, WEIGHTS, bytes_of_model, limit_volume
from tests.engine.processes import environment
from urllib3.exceptions import SSLError

from conveyor_engine.errors import ModelError
from conveyor_engine.fetching import bucket
from conveyor_engine.fetching.fetch import MARKER, fetch
from e2e.cluster.certificates import Authority


def grow(server: Server, root: Path, size: int) -> bytes:
    """Upload weights of `size` bytes in parts."""
    content = os.urandom(size)
    (root / "org/tiny" / WEIGHTS).write_bytes(content)
    server.upload(root / "org/tiny", "teams/a/tiny")
    server.requests.clear()
    return content


def test_only_what_the_engine_loads_is_fetched_and_marked(server: Server, root: Path, target: Path) -> None:
    fetch(URI, str(target))
    expected = {"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", WEIGHTS}
    assert {path.name for path in target.iterdir()} == expected | {MARKER}
    for name in expected:
        assert (target / name).read_bytes() == (root / "org/tiny" / name).read_bytes()
    server.requests.clear()
    fetch(URI, str(target))
    assert server.requests == [], "a second pod asks for nothing"


@pytest.mark.slow
def test_weights_in_parts_are_read_over_several_connections_and_compared(
    monkeypatch: pytest.MonkeyPatch, server: Server, root: Path, target: Path
) -> None:
    monkeypatch.setattr(bucket, "BLOCK_BYTES", 1 << 20)
    content = grow(server, root, 2 * PART_BYTES + 4711)
    server.corrupt = WEIGHTS
    with pytest.raises(ModelError, match=f"{WEIGHTS} of {URI} has .* digest [0-9a-f]{{32}}-3, but") as caught:
        fetch(URI, str(target))
    assert caught.value.reason == "ChecksumMismatch"
    assert not list(target.parent.rglob(f"{WEIGHTS}*"))
    server.corrupt = ""
    server.requests.clear()
    fetch(URI, str(target))
    assert (target / WEIGHTS).read_bytes() == content
    assert len([range for _, path, range in server.requests if range and path.endswith(WEIGHTS)]) == 11


def test_parts_of_several_sizes_are_compared_by_size_alone(server: Server, target: Path) -> None:
    parts = [bytes(PART_BYTES + 1), bytes(PART_BYTES), b"end"]
    upload_parts(server.client(), f"teams/a/tiny/{WEIGHTS}", parts)
    fetch(URI, str(target))
    assert (target / WEIGHTS).read_bytes() == b"".join(parts)


@pytest.mark.parametrize("file", [WEIGHTS, "tokenizer.json"])
def test_a_wrong_bit_is_reported(server: Server, target: Path, file: str) -> None:
    server.corrupt = file
    with pytest.raises(ModelError, match=file) as caught:
        fetch(URI, str(target))
    assert caught.value.reason == "ChecksumMismatch"


def test_a_cut_answer_is_gone_on_with(
    monkeypatch: pytest.MonkeyPatch, server: Server, root: Path, target: Path
) -> None:
    monkeypatch.setattr(bucket, "BLOCK_BYTES", 1 << 20)
    content = grow(server, root, 3 << 20)
    server.cut = "bytes=1048576-"
    fetch(URI, str(target))
    assert (target / WEIGHTS).read_bytes() == content
    starts = sorted(int(r[6:].partition("-")[0]) for _, path, r in server.requests if r and path.endswith(WEIGHTS))
    assert starts == [0, 1 << 20, 1 << 20, 2 << 20, 2 << 20], "nothing that is there already"


def test_a_file_that_began_is_resumed(
    monkeypatch: pytest.MonkeyPatch, server: Server, root: Path, target: Path
) -> None:
    content = (root / "org/tiny" / WEIGHTS).read_bytes()
    limit_volume(monkeypatch, target.parent, bytes_of_model(root))
    etag = server.client().head_object(Bucket=BUCKET, Key=f"teams/a/tiny/{WEIGHTS}")["ETag"].strip('"')
    partial = target.with_name(f".{target.name}.partial")
    partial.mkdir(parents=True)
    (partial / f"{WEIGHTS}.{etag[:16]}.unfinished").write_bytes(content[:200_000])
    fetch(URI, str(target))
    assert [r for _, path, r in server.requests if r and path.endswith(WEIGHTS)] == [f"bytes=200000-{len(content) - 1}"]
    assert (target / WEIGHTS).read_bytes() == content


def test_a_model_that_changes_meanwhile_is_not_mixed(
    monkeypatch: pytest.MonkeyPatch, server: Server, target: Path
) -> None:
    describe = bucket.Bucket.describe

    def describe_and_change(self: bucket.Bucket) -> object:
        model = describe(self)
        server.client().put_object(Bucket=BUCKET, Key=f"teams/a/tiny/{WEIGHTS}", Body=b"other")
        return model

    monkeypatch.setattr(bucket.Bucket, "describe", describe_and_change)
    with pytest.raises(ModelError, match="changed while it was fetched"):
        fetch(URI, str(target))
    assert not target.exists()


def test_what_an_older_engine_did_not_want_is_added_if_nothing_changed(
    server: Server, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.client().put_object(Bucket=BUCKET, Key="teams/a/tiny/1_Pooling/config.json", Body=b"{}")
    fetch(URI, str(target))
    marker = json.loads((target / MARKER).read_text())
    del marker["wanted"], marker["files"]["1_Pooling/config.json"]
    (target / "1_Pooling/config.json").unlink()
    (target / MARKER).write_text(json.dumps(marker))
    fetch(URI, str(target))
    assert (target / "1_Pooling/config.json").read_bytes() == b"{}"
    (target / MARKER).write_text(json.dumps(marker))
    server.client().put_object(Bucket=BUCKET, Key="teams/a/tiny/tokenizer.json", Body=b"later")
    fetch(URI, str(target))
    assert "is not what it was" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("names", [("model.pt2", "model.json"), ("model.pt2",), ("model.json",)], ids=str)
def test_a_program_comes_with_its_settings_and_nothing_else(
    server: Server, target: Path, names: tuple[str, ...]
) -> None:
    for name in (*names, "weights.pth", "README.md"):
        server.client().put_object(Bucket=BUCKET, Key=f"teams/b/program/{name}", Body=name.encode())
    fetch(f"s3://{BUCKET}/teams/b/program", str(target))
    assert {path.name for path in target.iterdir()} - {MARKER} == set(names)
    assert (target / names[0]).read_bytes() == names[0].encode()


def test_an_index_names_no_file_outside(server: Server, target: Path) -> None:
    index = {"weight_map": {"a": "../../secrets.safetensors"}}
    server.client().put_object(Bucket=BUCKET, Key=f"teams/a/tiny/{INDEX}", Body=json.dumps(index).encode())
    server.client().put_object(Bucket=BUCKET, Key="teams/a/tiny/../../secrets.safetensors", Body=b"x")
    with pytest.raises(ModelError, match="which is not there"):
        fetch(URI, str(target))


@pytest.mark.parametrize(
    ("uri", "reason", "words"),
    [
        ("s3://none/tiny", "ModelNotFound", "there is no bucket none at http://127.0.0.1"),
        (f"s3://{BUCKET}/teams/a", "ModelNotFound", "has no files there"),
        (f"s3://{BUCKET}/teams/a/tiny/onnx", "UnsupportedModel", "has none of config.json, model.pt2, model.json"),
    ],
)
def test_what_cannot_be_found_is_said(server: Server, target: Path, uri: str, reason: str, words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        fetch(uri, str(target))
    assert caught.value.reason == reason


@pytest.mark.slow
def test_keys_and_policies_count(monkeypatch: pytest.MonkeyPatch, server: Server, target: Path) -> None:
    user = make_user(server, "s3:ListBucket", "s3:GetObject")
    check_access(monkeypatch)
    for key, secret, words in (
        ("AKIAIOSFODNN7EXAMPLE", "SECRET", "refuses the keys: InvalidAccessKeyId"),
        (user.key, "SECRET", "refuses the keys: SignatureDoesNotMatch"),
    ):
        set_keys(monkeypatch, key, secret)
        with pytest.raises(ModelError, match=words) as caught:
            fetch(URI, str(target))
        assert caught.value.reason == "ModelDownloadFailed"
        assert "SECRET" not in str(caught.value)
        assert key not in str(caught.value)
    set_keys(monkeypatch, user.key, user.secret)
    fetch(URI, str(target))


@pytest.mark.parametrize("actions", [(), ("s3:ListBucket",)])
def test_what_is_not_allowed_says_what_it_takes(
    monkeypatch: pytest.MonkeyPatch, server: Server, target: Path, actions: tuple[str, ...]
) -> None:
    user = make_user(server, *actions)
    check_access(monkeypatch)
    set_keys(monkeypatch, user.key, user.secret)
    with pytest.raises(ModelError, match=r"is refused: .*; the credentials need s3:ListBucket and s3:GetObject"):
        fetch(URI, str(target))


def test_without_credentials_it_says_where_they_come_from(
    monkeypatch: pytest.MonkeyPatch, server: Server, target: Path
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("HOME", str(target.parent))
    with pytest.raises(ModelError, match=r"set secretRef, or give the pods' ServiceAccount a role"):
        fetch(URI, str(target))


def test_a_service_account_s_token_is_exchanged_for_a_role(
    monkeypatch: pytest.MonkeyPatch, server: Server, target: Path, tmp_path: Path
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    (tmp_path / "token").write_text("header.claims.signature")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/models")
    fetch(URI, str(target))
    assert server.requests[0][:2] == ("POST", "/"), "STS"


def test_an_endpoint_that_is_not_there_is_said_without_its_password(
    monkeypatch: pytest.MonkeyPatch, server: Server, target: Path
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", NOWHERE.replace("//", "//team:PASSWORD@"))
    with pytest.raises(ModelError, match=f"at {NOWHERE} cannot be fetched: EndpointConnectionError") as caught:
        fetch(URI, str(target))
    assert caught.value.reason == "ModelDownloadFailed"
    assert "PASSWORD" not in str(caught.value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "team:PASSWORD@bucket.example")
    with pytest.raises(ModelError, match="AWS_ENDPOINT_URL is not the URL") as caught:
        fetch(URI, str(target))
    assert "PASSWORD" not in str(caught.value)


def test_tls_that_fails_within_a_body_is_reported(
    monkeypatch: pytest.MonkeyPatch, server: Server, target: Path
) -> None:
    def fail(*_: object) -> bytes:
        raise SSLError("bad record mac")

    monkeypatch.setattr(bucket.Bucket, "_read", fail)
    with pytest.raises(ModelError, match="cannot be fetched: SSLError: bad record mac") as caught:
        fetch(URI, str(target))
    assert caught.value.reason == "ModelDownloadFailed"


def test_a_folder_of_a_thousand_files_is_no_model(
    monkeypatch: pytest.MonkeyPatch, server: Server, target: Path
) -> None:
    monkeypatch.setattr(bucket, "MAX_FILES", 3)
    with pytest.raises(ModelError, match="more than 3 files"):
        fetch(URI, str(target))


def test_botocore_is_imported_for_buckets_alone(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    code = (
        "import sys; from conveyor_engine.fetching.fetch import fetch; fetch('pvc://models/tiny', sys.argv[1]); "
        "import conveyor_engine.__main__; print({'botocore', 'huggingface_hub'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "model")]
    found = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_a_bucket_in_an_exempt_network_is_read_without_the_proxy(
    monkeypatch: pytest.MonkeyPatch, server: Server, target: Path
) -> None:
    monkeypatch.setenv("HTTP_PROXY", NOWHERE)
    monkeypatch.setenv("http_proxy", NOWHERE)
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(ModelError, match="cannot be fetched"):
        fetch(URI, str(target))
    monkeypatch.setenv("no_proxy", "127.0.0.0/8")
    fetch(URI, str(target))
    assert (target / WEIGHTS).exists()


def test_a_bucket_whose_certificate_is_of_ones_own_authority(
    monkeypatch: pytest.MonkeyPatch, server: Server, target: Path, tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "authority", "authority")
    pair = authority.issue("bucket", "bucket", names=["127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    server.encrypt(context)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    with pytest.raises(ModelError, match="CERTIFICATE_VERIFY_FAILED"):
        fetch(URI, str(target))
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
    fetch(URI, str(target))
    assert (target / WEIGHTS).exists()
