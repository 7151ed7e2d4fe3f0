"""`kubectl conveyor key`: makes the keys of APIKeys, whose objects have only their hashes. For `command`.

A key is printed once and stored nowhere.
"""

import argparse
import re
import secrets
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import yaml

from conveyor_api import names
from conveyor_api.access import EVERY
from conveyor_api.api_key import SECRET_DIGITS, APIKey, build_key, hash_key
from conveyor_api.errors import InvalidResource
from conveyor_insight.facts import Object, Unanswered
from conveyor_insight.tables import build_table
from conveyor_kubectl.cluster import Cluster
from conveyor_operator.kinds import API_KEY

DESCRIPTION: Final = "Create, list, rotate and revoke keys with which clients use services."
_CREATE: Final = """Make a key, print it once, and create the APIKey NAME with the key's hash. The key itself is stored
nowhere. Standard output has only the key. With -o yaml the command creates nothing, and standard output has the APIKey
for a Git repository; the key is on standard error."""
_LIST: Final = "List the APIKeys of a namespace."
_ROTATE: Final = """Make a new key for an APIKey, and print it once. The former key stays valid for the time of
--overlap. With -o yaml the command changes nothing, and prints as key create does."""
_REVOKE: Final = """Delete an APIKey. Gateways reject its keys within 2 seconds; requests that run are not ended."""
_SPAN: Final = re.compile("([0-9]{1,5})([mhd])")
_UNITS: Final = {"m": "minutes", "h": "hours", "d": "days"}
_LIMITS: Final = ("requests-per-minute", "tokens-per-minute", "tokens-per-day", "concurrent-requests")
_TIME: Final = "%Y-%m-%dT%H:%M:%SZ"

Print = Callable[..., None]


def add_commands(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """Add the commands of `key`. Return their parsers."""
    actions = parser.add_subparsers(dest="action", required=True)
    creating = actions.add_parser("create", help="make a key and its APIKey", description=_CREATE)
    listing = actions.add_parser("list", help="list the APIKeys of a namespace", description=_LIST)
    rotating = actions.add_parser("rotate", help="replace the key of an APIKey", description=_ROTATE)
    revoking = actions.add_parser("revoke", help="delete an APIKey", description=_REVOKE)
    for each in (creating, rotating, revoking):
        each.add_argument("name", metavar="NAME", help="name of the APIKey")
    creating.add_argument(
        "--services",
        metavar="LIST",
        default="*",
        help="services that the key may use, with commas between them: names in the namespace, `*` for all of them, or "
        "NAMESPACE/NAME (default: %(default)s)",
    )
    creating.add_argument("--owner", metavar="TEXT", help="who uses the key, for limits and usage")
    creating.add_argument("--max-class", metavar="CLASS", help="most urgent class of the key's requests")
    for limit in _LIMITS:
        creating.add_argument(f"--{limit}", type=int, metavar="N", help=f"limit of {limit.replace('-', ' ')}")
    creating.add_argument(
        "--expires",
        type=_parse_span,
        metavar="TIME",
        help="how long the key is valid, for example 90d (default: no end)",
    )
    rotating.add_argument(
        "--overlap",
        type=_parse_span,
        metavar="TIME",
        default="24h",
        help="how long the former key stays valid, in minutes, hours or days such as 30m, 24h or 7d "
        "(default: %(default)s)",
    )
    for each in (creating, rotating):
        each.add_argument(
            "-o", "--output", choices=["key", "yaml"], default="key", help="output (default: %(default)s)"
        )
    parsers = [creating, listing, rotating, revoking]
    for each in parsers:
        each.add_argument("-n", "--namespace", help="namespace of the APIKey (default: the context's)")
    return parsers


def run(connect: Callable[[], Cluster], flags: argparse.Namespace, show: Print) -> int:
    """Run a command of `key`. Raises Unanswered. A manifest with a given namespace needs no cluster."""
    namespace = flags.namespace or connect().namespace
    match flags.action:
        case "create":
            _create(connect, namespace, flags, show)
        case "rotate":
            _rotate(connect(), namespace, flags, show)
        case "revoke":
            path = API_KEY.path(namespace, flags.name)
            cluster = connect()
            cluster.get(path)
            cluster.delete(path)
            show(f"revoked {namespace}/{flags.name}", sys.stderr)
        case _:
            show(_build_list(connect().get(API_KEY.path(namespace))["items"]))
    return 0


def _create(connect: Callable[[], Cluster], namespace: str, flags: argparse.Namespace, show: Print) -> None:
    key = build_key(namespace, secrets.token_bytes(SECRET_DIGITS // 2))
    limits = {_camel(limit): getattr(flags, limit.replace("-", "_")) for limit in _LIMITS}
    spec: dict[str, Any] = {
        "hashes": [{"sha256": hash_key(key)}],
        "services": [each.strip() for each in flags.services.split(",")],
        "owner": flags.owner,
        "maxClass": flags.max_class,
        "limits": {name: limit for name, limit in limits.items() if limit is not None} or None,
        "expires": None if flags.expires is None else _format(flags.expires),
    }
    body = _build(namespace, flags.name, {name: value for name, value in spec.items() if value is not None})
    if flags.output != "yaml":
        connect().create(API_KEY.path(namespace), body)
    _show(key, body, flags, show)


def _rotate(cluster: Cluster, namespace: str, flags: argparse.Namespace, show: Print) -> None:
    """Replace the key. Of two former keys, the one that expires first is dropped. Raises Unanswered."""
    path = API_KEY.path(namespace, flags.name)
    found = cluster.get(path)
    if (ends := found["spec"].get("expires")) is not None and ends <= _format(timedelta()):
        message = f"the APIKey {namespace}/{flags.name} expired at {ends}; set a later spec.expires, or remove it"
        raise Unanswered(message)
    key = build_key(namespace, secrets.token_bytes(SECRET_DIGITS // 2))
    former = max(found["spec"]["hashes"], key=_find_end)
    end = min(_find_end(former), _format(flags.overlap))
    hashes = [{"sha256": hash_key(key)}, {"sha256": former["sha256"], "expires": end}]
    spec = {**found["spec"], "hashes": hashes}
    if flags.output != "yaml":
        cluster.replace(path, {**found, "spec": spec})
    _show(key, _build(namespace, flags.name, spec), flags, show)


def _build(namespace: str, name: str, spec: Mapping[str, Any]) -> Object:
    """Return the manifest. Raises Unanswered if the API server would refuse it."""
    body = {
        "apiVersion": names.API_VERSION,
        "kind": names.API_KEY_KIND,
        "metadata": {"name": name, "namespace": namespace},
        "spec": dict(spec),
    }
    try:
        APIKey.parse(body)
    except InvalidResource as error:
        raise Unanswered(str(error)) from error
    return body


def _show(key: str, body: Object, flags: argparse.Namespace, show: Print) -> None:
    """Print the key, which is not shown again, or the manifest and the key apart from it."""
    where = f"{body['metadata']['namespace']}/{body['metadata']['name']}"
    if flags.output == "yaml":
        show(yaml.safe_dump(body, sort_keys=False).rstrip())
        show(f"the key of {where}, which is not shown again: {key}", sys.stderr)
    else:
        show(f"the key of {where} is not shown again; send it as Authorization: Bearer or x-api-key", sys.stderr)
        show(key)


def _build_list(items: list[Object]) -> str:
    if not items:
        return "there are no APIKeys in the namespace"
    rows = [("NAME", "OWNER", "SERVICES", "CLASS", "LIMITS", "EXPIRES", "KEYS", "LAST USED", "REJECTED")]
    return build_table([*rows, *map(_build_row, items)])


def _build_row(body: Object) -> tuple[str, ...]:
    spec, now = body["spec"], datetime.now(UTC).strftime(_TIME)
    limits = ",".join(f"{name}={limit}" for name, limit in spec.get("limits", {}).items())
    status, rejection = body.get("status", {}), body.get("status", {}).get("lastRejection")
    valid, ends = sum(_find_end(each) > now for each in spec["hashes"]), spec.get("expires")
    return (
        body["metadata"]["name"],
        spec.get("owner", "-"),
        ",".join(spec.get("services", [EVERY])),
        spec.get("maxClass", "-"),
        limits or "-",
        "-" if ends is None else ends if ends > now else f"{ends} (expired)",
        str(valid),
        status.get("lastUsed", "-"),
        f"{rejection['day']} {rejection['reason']}" if rejection else "-",
    )


def _find_end(key_hash: Object) -> str:
    """Return when a key expires, as a text that is sorted by time."""
    return str(key_hash.get("expires", "never"))


def _parse_span(text: str) -> timedelta:
    match = _SPAN.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 30m, 24h or 90d")
    return timedelta(**{_UNITS[match[2]]: int(match[1])})


def _format(span: timedelta) -> str:
    return (datetime.now(UTC) + span).strftime(_TIME)


def _camel(flag: str) -> str:
    first, *rest = flag.split("-")
    return first + "".join(map(str.capitalize, rest))
