"""The operator, the gateway and the metrics server are told the same things by the same words."""

from conveyor_gateway.settings import PROGRAM as GATEWAY
from conveyor_metrics.settings import PROGRAM as METRICS
from conveyor_operator.settings import PROGRAM as OPERATOR


def test_what_all_three_can_be_told_has_one_name_and_one_default() -> None:
    programs = (OPERATOR, GATEWAY, METRICS)
    told = [{(row.flag, row.must_be, row.default) for row in program.rows()} for program in programs]
    alike = {flag for flag, _, _ in set.intersection(*told)}
    assert alike == {"--host", "--admin-port", "--system-namespace", "--kubeconfig", "--log-level"}


def test_operator_and_gateway_watch_namespaces_by_the_same_name() -> None:
    assert all("--watch-namespaces" in {row.flag for row in program.rows()} for program in (OPERATOR, GATEWAY))
