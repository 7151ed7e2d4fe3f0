"""Writes each stored object of Conveyor again, so that the API server stores it in the CRD's storage version.

A CRD cannot drop a version while `status.storedVersions` lists it, and the API server changes the stored version of an
object only when somebody writes the object. Used by `command`.
"""

from collections.abc import Callable, Iterator
from typing import Final

from conveyor_api import names
from conveyor_insight.facts import Object, Unanswered
from conveyor_kubectl.cluster import Cluster, Refused

DESCRIPTION: Final = """Store every InferenceService and ServedName in the current version of its CRD. Run the command
after an upgrade that added an API version, before an upgrade that removes the former one. The command writes each
object unchanged, so nothing is reconfigured or restarted. It can be repeated, and it can be interrupted at any time."""

CRD_NAMES: Final = (names.CRD_NAME, names.SERVED_NAME_CRD_NAME)
_CRDS: Final = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_PAGE_OBJECTS: Final = 100
_WRITTEN_MEANWHILE: Final = (404, 409)  # 404: deleted meanwhile. 409: others wrote it, in the current version
_EXPIRED: Final = 410


def migrate(cluster: Cluster, say: Callable[[str], None]) -> int:
    """Write all objects again. Returns the exit code: 1 if an object was not written. Raises Refused or Unanswered."""
    num_failed = sum(_migrate_kind(cluster, name, say) for name in CRD_NAMES)
    return 1 if num_failed else 0


def _migrate_kind(cluster: Cluster, crd_name: str, say: Callable[[str], None]) -> int:
    """Write all objects of one kind again. Returns the number of objects that the API server rejected."""
    crd = cluster.find(f"{_CRDS}/{crd_name}")
    if crd is None:
        raise Unanswered(f"the CRD {crd_name} is not installed")
    version = next(each["name"] for each in crd["spec"]["versions"] if each["storage"])
    former = [stored for stored in crd["status"]["storedVersions"] if stored != version]
    kind = crd["spec"]["names"]["plural"]
    if not former:
        say(f"{kind}: all are stored in {version}, nothing to do")
        return 0
    say(f"{kind}: some may still be stored in {', '.join(former)}; writing each in {version}")
    written, rejected, root = set[str](), set[str](), f"/apis/{names.GROUP}/{version}"
    for body in _list_all(cluster, root, kind):
        key = f"{body['metadata']['namespace']}/{body['metadata']['name']}"
        if key in written or key in rejected:  # the list has started again
            continue
        failure = _write(cluster, root, kind, body)
        (written if failure is None else rejected).add(key)
        if failure is not None:
            say(failure)
        elif len(written) % _PAGE_OBJECTS == 0:
            say(f"{kind}: {len(written)} written")
    if not rejected:
        _finish(cluster, crd_name, version, former)
        say(f"{kind}: {len(written)} are stored in {version}; {', '.join(former)} can be removed from the CRD")
    return len(rejected)


def _list_all(cluster: Cluster, root: str, kind: str) -> Iterator[Object]:
    """Yield all objects, read page by page. If the list expires, which happens after minutes, start again."""
    query = {"limit": str(_PAGE_OBJECTS)}
    while True:
        try:
            page = cluster.get(f"{root}/{kind}", query)
        except Refused as error:
            if error.status != _EXPIRED or "continue" not in query:
                raise
            query.pop("continue")
            continue
        yield from page["items"]
        if not (token := page["metadata"].get("continue")):
            return
        query["continue"] = token


def _write(cluster: Cluster, root: str, kind: str, body: Object) -> str | None:
    metadata = body["metadata"]
    try:
        cluster.replace(f"{root}/namespaces/{metadata['namespace']}/{kind}/{metadata['name']}", body)
    except Refused as error:
        if error.status not in _WRITTEN_MEANWHILE:
            return f"{kind}: {metadata['namespace']}/{metadata['name']} is not written: {error}"
    return None


def _finish(cluster: Cluster, crd_name: str, version: str, former: list[str]) -> None:
    """Remove the former versions from the CRD's `storedVersions`.

    Raises Unanswered if the CRD's storage version has changed meanwhile.
    """
    crd = cluster.get(f"{_CRDS}/{crd_name}")
    if next(each["name"] for each in crd["spec"]["versions"] if each["storage"]) != version:
        raise Unanswered(f"the CRD {crd_name} was changed meanwhile; run the command again")
    stored = [each for each in crd["status"]["storedVersions"] if each not in former]
    crd["status"]["storedVersions"] = stored
    cluster.replace(f"{_CRDS}/{crd_name}/status", crd)
