"""Tests that keys, limits and usage need no right on Secrets.

The chart's rights on Secrets must be those of the release before keys existed. A rule with a wildcard counts too.
"""

from typing import Final

import pytest
from tests.chart.installation import RELEASE, render

from conveyor_api.names import METRICS_TLS_SECRET

Right = tuple[str, str, str, str]
"""Kind and name of the role, verb, and the Secret's name; "*" for every Secret."""

# Rendered by the chart of commit 7d1f5153, the last one before APIKeys, with its defaults and for one namespace.
BEFORE_KEYS: Final = {
    ("Role", f"{RELEASE}-operator", verb, METRICS_TLS_SECRET) for verb in ("create", "list", "patch", "watch")
}
EVERYTHING: Final = ("console.enabled=true", "gateway.access=Enforced", "engine.access=Gateways")


def find_rights(*values: str) -> set[Right]:
    """Return the rights on Secrets that the rendered roles grant."""
    return {
        (item["kind"], item["metadata"]["name"], verb, name)
        for item in render(*values)
        if item["kind"] in ("Role", "ClusterRole")
        for rule in item.get("rules") or ()
        if {"", "*"} & set(rule.get("apiGroups", ())) and {"secrets", "*"} & set(rule.get("resources", ()))
        for verb in rule["verbs"]
        for name in rule.get("resourceNames") or ("*",)
    }


@pytest.mark.parametrize("values", [(), EVERYTHING, (*EVERYTHING, "watchNamespaces={team-a}")], ids=len)
def test_the_rights_on_secrets_are_those_of_the_release_before_keys(values: tuple[str, ...]) -> None:
    assert find_rights(*values) == BEFORE_KEYS
