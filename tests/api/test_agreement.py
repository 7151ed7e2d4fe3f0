"""The parser and the API server accept and refuse the same resources, also those that nobody thought of.

Known to differ, and left out: `E` alone, which Kubernetes takes for a quantity (of nothing) and the parser does not.
"""

from copy import deepcopy
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.api.builders import Json, build_body, build_full_body
from tests.api.conftest import Services

from conveyor_api.errors import InvalidResource
from conveyor_api.resource import InferenceService

NUMBERS = (-1, 0, 1, 2, 8, 16, 17, 100, 101, 1000, 1001, 10**9, 10**12, True)
DURATIONS = ("10ms", "0s", "1h", "1h1ms", "10ms\n", "999999h999999h", "PT1S")
QUANTITIES = ("0", "-1", "+5", "500m", "2Gi", "1e3", "1e99", ".5", "1.", "1Ei", "9" * 30, "0x1", "1 ", "1GB")
SHARES = ("0%", "25%", "01%", "999%", "1000%", "%", "0.5", "0.01", "0.0099", "1.0", "0.00001")
URIS = ("hf://a/b", "hf://_a/b@v1", "hf://a/b@c/..", "hf://a", "pvc://a/b", "pvc://a./b", "pvc://a/b/", "pvc://a/.b")
WORDS = ("", "a b", "A", "None", "Auto", "PVC", "é", "١", "x\n", "a" * 600, "HF_TOKEN", "CONVEYOR_ENGINE_PORT")
CONTAINERS: tuple[Any, ...] = ({}, [], {"a": 1}, {"name": "x"}, [{"name": "x"}], [1])
VALUES: tuple[Any, ...] = (*NUMBERS, *DURATIONS, *QUANTITIES, *SHARES, *URIS, *WORDS, *CONTAINERS)
SMALL_BODY = build_body("small", batching={"mode": "Static", "window": "1s"}, rollout={"maxSurge": 1})


def accepted_by_parser(body: Json) -> bool:
    try:
        InferenceService.parse(body)
    except InvalidResource:
        return False
    return True


def replace_somewhere(body: Json, data: st.DataObject) -> None:
    """Puts a value of VALUES in the place of one that is there, or takes one away, at any depth of the spec."""
    holder: Any = body["spec"]
    while True:
        key = data.draw(st.sampled_from(sorted(holder) if isinstance(holder, dict) else range(len(holder))))
        if not isinstance(holder[key], dict | list) or not holder[key] or data.draw(st.integers(0, 4)) == 0:
            break
        holder = holder[key]
    if data.draw(st.integers(0, 5)) == 0:
        del holder[key]
    else:
        holder[key] = data.draw(st.sampled_from(VALUES))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_parser_and_api_server_agree(services_in_default: Services, data: st.DataObject) -> None:
    body = build_full_body() if data.draw(st.booleans()) else deepcopy(SMALL_BODY)
    replace_somewhere(body, data)
    assert accepted_by_parser(body) == services_in_default.would_create(body)
