"""Tests flags, variables and defaults, and the error for each value that cannot be used."""

from pathlib import Path

import pytest

from conveyor_metrics.settings import PROGRAM, Settings
from conveyor_process.settings import SettingsError


def test_without_anything_the_defaults_hold() -> None:
    assert PROGRAM.parse([], {}) == Settings()


def test_flags_win_over_variables_and_variables_over_defaults() -> None:
    environment = {"CONVEYOR_METRICS_SYSTEM_NAMESPACE": "a", "CONVEYOR_METRICS_CERTIFICATE_FOLDER": "/tls"}
    settings = PROGRAM.parse(["--system-namespace=b", "--gateway-timeout-seconds=0.5"], environment)
    assert (settings.system_namespace, settings.certificate_folder) == ("b", Path("/tls"))
    assert settings.gateway_timeout_seconds == 0.5


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--https-port=https", "`https_port` must be a port number from 0 to 65535, not 'https'"),
        ("--admin-port=70000", "`admin_port` must be a port number from 0 to 65535, not '70000'"),
        ("--gateway-timeout-seconds=0", "must be a number of seconds from 0.001 to 20"),
        ("--gateway-timeout-seconds=nan", "must be a number of seconds from 0.001 to 20"),
        ("--log-level=loud", "must be DEBUG, INFO, WARNING or ERROR"),
    ],
)
def test_what_cannot_be_used_is_refused_with_what_could_be(flag: str, sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        PROGRAM.parse([flag], {})


def test_an_unknown_variable_is_refused() -> None:
    with pytest.raises(SettingsError, match="environment variable CONVEYOR_METRICS_PORTS: unknown key 'ports'"):
        PROGRAM.parse([], {"CONVEYOR_METRICS_PORTS": "1", "CONVEYOR_GATEWAY_PORT": "2"})


def test_an_unknown_flag_ends_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        PROGRAM.parse(["--gateway-timeout=1"], {})
    assert "unrecognized arguments" in capsys.readouterr().err
