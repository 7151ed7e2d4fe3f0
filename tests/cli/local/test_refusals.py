"""What the API server refuses, `conveyor run` refuses with the same words."""

import json

import pytest
from tests.api.bad_builders import Bad
from tests.api.bad_services import BAD_SERVICES
from tests.api.conftest import Services

from conveyor_local.refusals import describe_refusal
from e2e.cluster.api import ApiError

# Both read one schema and one list of rules, so CI compares every fourth; tests/api shows what the API server refuses.
CASES = [
    pytest.param(bad, marks=() if number % 4 == 0 else pytest.mark.slow, id=bad.title)
    for number, bad in enumerate(BAD_SERVICES)
]


@pytest.mark.parametrize("bad", CASES)
def test_a_bad_service_is_refused_with_the_api_server_s_words(bad: Bad, services_in_default: Services) -> None:
    with pytest.raises(ApiError) as caught:
        services_in_default.create(bad.body)
    theirs = json.loads(str(caught.value).partition(": ")[2])["message"]
    ours = describe_refusal(bad.body)
    head, _, problems = ours.partition(" is invalid: ")
    assert theirs.startswith(head)
    assert all(problem in theirs for problem in problems.strip("[]").split(", spec.")), f"{theirs}\n{ours}"
    assert bad.sentence in ours, ours
