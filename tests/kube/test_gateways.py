"""Tests which gateways there are according to their EndpointSlices."""

from typing import Any

import pytest

from conveyor_kube.gateways import parse_gateways
from conveyor_kube.unreadable import Unreadable

Json = dict[str, Any]


def build_slice(endpoints: list[Json], port: int = 8081, name: str = "admin") -> Json:
    return {"metadata": {"name": "s"}, "ports": [{"name": name, "port": port}], "endpoints": endpoints}


def test_terminating_and_starting_gateways_are_queried_too() -> None:
    draining = {"ready": True, "serving": True, "terminating": True}
    endpoints = [
        {"addresses": ["10.0.0.1"], "conditions": draining},
        {"addresses": ["10.0.0.2"], "conditions": {"ready": True, "serving": False, "terminating": False}},
        {"addresses": ["10.0.0.3"]},
    ]
    gateways = parse_gateways([build_slice(endpoints)], Unreadable("slice"))
    assert [(gateway.host, gateway.serving) for gateway in gateways] == [
        ("10.0.0.1", True),
        ("10.0.0.2", False),
        ("10.0.0.3", True),
    ]


def test_a_gateway_that_two_slices_name_is_queried_once() -> None:
    endpoints: list[Json] = [{"addresses": ["10.0.0.1"]}]
    assert len(parse_gateways([build_slice(endpoints), build_slice(endpoints)], Unreadable("slice"))) == 1


def test_only_the_admin_port_is_queried_and_ipv6_is_written_in_brackets() -> None:
    slices = [build_slice([{"addresses": ["fd00::1"]}]), build_slice([{"addresses": ["fd00::2"]}], 80, "http")]
    assert [gateway.url("/demand") for gateway in parse_gateways(slices, Unreadable("slice"))] == [
        "http://[fd00::1]:8081/demand"
    ]


def test_a_slice_that_cannot_be_read_is_left_out_and_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    odd = {**build_slice([{}]), "metadata": {"name": "odd"}}
    without_number = {**build_slice([{"addresses": ["10.0.0.2"]}]), "ports": [{"name": "admin"}]}
    gateways = parse_gateways([odd, without_number, build_slice([{"addresses": ["10.0.0.1"]}])], Unreadable("slice"))
    assert [gateway.host for gateway in gateways] == ["10.0.0.1"]
    assert "kind=slice key=odd " in caplog.text
