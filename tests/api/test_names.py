"""Names that other parts, or people's scripts, rely on."""

from conveyor_api import names


def test_a_child_is_named_after_its_service() -> None:
    assert names.engine_name("qwen") == "qwen-engine"
    assert names.public_service_name("qwen") == "qwen"
    assert names.config_map_name("qwen", "0a1b2c3d") == "qwen-engine-0a1b2c3d"
    assert names.model_claim_name("qwen") == "qwen-models"


def test_names_of_the_longest_service_fit_a_dns_label() -> None:
    longest = "q" * names.MAX_SERVICE_NAME_LENGTH
    replica_set = f"{names.engine_name(longest)}-{'0' * 10}"  # pods add six; Kubernetes cuts theirs to fit
    assert len(replica_set) <= 63
    assert len(names.config_map_name(longest, "0" * 8)) <= 63
    assert len(names.model_claim_name(longest)) <= 63


def test_the_selector_is_among_the_labels_in_both_forms() -> None:
    selector = names.pod_selector("qwen")
    assert selector.items() <= names.child_labels("qwen").items()
    assert names.pod_selector_string("qwen") == "=".join(*selector.items())


def test_a_service_has_a_path_on_the_gateway() -> None:
    assert names.gateway_path("team", "qwen") == "/team/qwen/v1"
    assert names.gateway_host("llm", "example.org") == "conveyor-gateway.llm.svc.example.org"
