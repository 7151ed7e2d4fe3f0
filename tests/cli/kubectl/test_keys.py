"""Tests `kubectl conveyor key` on a real API server: the objects that it writes, and where a key is printed."""

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.gateway.keys import make_api_key

from conveyor_api import names
from conveyor_api.api_key import hash_key
from conveyor_gateway.watching.keys import KeyTable
from conveyor_kubectl.command import main
from e2e.cluster.api import Api
from e2e.cluster.control_plane import ControlPlane

Run = Callable[..., tuple[int, str, str]]
KEY = re.compile(r"sk-conveyor-[a-z0-9-]+-[0-9a-f]{64}")


@pytest.fixture
def run(crd: Api, control_plane: ControlPlane, namespace: str, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["key", *arguments, "-n", namespace, f"--kubeconfig={control_plane.kubeconfig}"])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def find(crd: Api, namespace: str) -> Callable[[str], Any]:
    path = f"/apis/{names.GROUP}/{names.VERSION}/namespaces/{namespace}/{names.API_KEY_PLURAL}"
    return lambda name: crd.get(f"{path}/{name}")


def find_caller(body: Any, key: str) -> str | None:
    """Return the name of the caller that a gateway finds for the key."""
    table = KeyTable()
    table.put(body)
    proof = table.find(key)
    return proof.caller.name if proof is not None and proof.caller is not None else None


def read_time(text: str) -> datetime:
    return datetime.fromisoformat(text)


def test_create_prints_the_key_alone_and_stores_only_its_hash(
    run: Run, find: Callable[[str], Any], namespace: str
) -> None:
    limits = ("--requests-per-minute=60", "--tokens-per-day=1000000")
    code, out, err = run("create", "ci", "--services=chat, team-b/x", "--owner=ml", "--expires=90d", *limits)
    key = out.strip()
    assert (code, bool(KEY.fullmatch(key))) == (0, True)
    assert key.startswith(f"sk-conveyor-{namespace}-")
    assert key not in err
    body = find("ci")
    assert key not in str(body)
    assert body["spec"]["hashes"] == [{"sha256": hash_key(key)}]
    assert (body["spec"]["services"], body["spec"]["owner"]) == (["chat", "team-b/x"], "ml")
    assert body["spec"]["limits"] == {"requestsPerMinute": 60, "tokensPerDay": 1000000}
    assert timedelta(days=89) < read_time(body["spec"]["expires"]) - datetime.now(UTC) < timedelta(days=91)
    assert find_caller(body, key) == f"{namespace}/ci"


def test_two_keys_differ_and_a_taken_name_is_refused(run: Run) -> None:
    first, second = run("create", "one")[1], run("create", "two")[1]
    assert first != second
    code, out, err = run("create", "one")
    assert (code, out) == (1, "")
    assert 'apikeys.conveyor.dev "one" already exists' in err


def test_yaml_is_for_git_and_creates_nothing(run: Run, crd: Api, namespace: str) -> None:
    code, out, err = run("create", "ci", "-o", "yaml")
    found = KEY.search(err)
    assert (code, KEY.search(out)) == (0, None)
    assert found is not None
    body = yaml.safe_load(out)
    assert find_caller(body, found[0]) == f"{namespace}/ci"
    assert "no APIKeys" in run("list")[1]
    path = f"/apis/{names.GROUP}/{names.VERSION}/namespaces/{namespace}/{names.API_KEY_PLURAL}/ci"
    crd.apply(path, body)
    assert "ci" in run("list")[1]


def test_a_rotation_keeps_the_former_key_for_a_while(run: Run, find: Callable[[str], Any], namespace: str) -> None:
    former = run("create", "ci", "--owner=ml")[1].strip()
    code, out, _ = run("rotate", "ci", "--overlap=2h")
    new, body = out.strip(), find("ci")
    assert (code, body["spec"]["owner"]) == (0, "ml")
    assert [find_caller(body, key) for key in (new, former)] == [f"{namespace}/ci"] * 2
    ends = [each.get("expires") for each in body["spec"]["hashes"]]
    assert ends[0] is None
    assert timedelta(hours=1) < read_time(ends[1]) - datetime.now(UTC) <= timedelta(hours=2)
    newest = run("rotate", "ci")[1].strip()
    assert [find_caller(find("ci"), key) is not None for key in (newest, new, former)] == [True, True, False]
    assert run("list")[1].splitlines()[1].split()[-3] == "2"


def test_a_revoked_key_is_gone_and_a_missing_one_is_named(run: Run) -> None:
    run("create", "ci")
    assert run("revoke", "ci")[0] == 0
    code, _, err = run("revoke", "ci")
    assert code == 1
    assert 'apikeys.conveyor.dev "ci" not found' in err


def test_the_list_shows_who_may_what_until_when(run: Run) -> None:
    run("create", "ci", "--owner=ml", "--services=chat", "--max-class=batch", "--concurrent-requests=4")
    header, row = run("list")[1].splitlines()
    assert header.split() == [
        "NAME",
        "OWNER",
        "SERVICES",
        "CLASS",
        "LIMITS",
        "EXPIRES",
        "KEYS",
        "LAST",
        "USED",
        "REJECTED",
    ]
    assert row.split() == ["ci", "ml", "chat", "batch", "concurrentRequests=4", "-", "1", "-", "-"]


def test_the_list_shows_an_object_without_services(run: Run, crd: Api, namespace: str) -> None:
    """The API server adds no default, and the gateway takes the absence as *."""
    body = make_api_key(namespace)
    path = f"/apis/{names.GROUP}/{names.VERSION}/namespaces/{namespace}/{names.API_KEY_PLURAL}/ci"
    crd.apply(path, body)
    code, out, _ = run("list")
    assert (code, out.splitlines()[1].split()[:3]) == (0, ["ci", "-", "*"])


def test_a_manifest_needs_no_cluster_if_the_namespace_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = f"--kubeconfig={tmp_path / 'absent'}"
    assert main(["key", "create", "ci", "-n", "team-a", "-o", "yaml", absent]) == 0
    captured = capsys.readouterr()
    found = KEY.search(captured.err)
    assert found is not None
    assert find_caller(yaml.safe_load(captured.out), found[0]) == "team-a/ci"
    for arguments in (["-n", "team-a"], ["-o", "yaml"]):
        assert main(["key", "create", "ci", *arguments, absent]) == 1
        assert "cannot load a kubeconfig" in capsys.readouterr().err


def test_an_expired_object_gets_no_new_key_because_nobody_could_use_it(
    run: Run, find: Callable[[str], Any], crd: Api, namespace: str
) -> None:
    body = make_api_key(namespace, "old", expires="2026-01-01T00:00:00Z")
    path = f"/apis/{names.GROUP}/{names.VERSION}/namespaces/{namespace}/{names.API_KEY_PLURAL}/old"
    crd.apply(path, body)
    code, out, err = run("rotate", "old")
    assert (code, out) == (1, "")
    assert f"the APIKey {namespace}/old expired at 2026-01-01T00:00:00Z; set a later spec.expires" in err
    assert find("old")["spec"] == body["spec"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--services=Chat",), "must be the name of a service"),
        (("--owner=two words",), "must be printable ASCII"),
        (("--tokens-per-day=0",), "greater than or equal to 1"),
    ],
)
def test_a_mistake_is_named_before_a_key_is_printed(run: Run, arguments: tuple[str, ...], words: str) -> None:
    code, out, err = run("create", "ci", *arguments)
    assert (code, out) == (1, "")
    assert words in err
