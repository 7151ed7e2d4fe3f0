"""Tests that flags take precedence over the environment and defaults, and that errors name the wrong setting."""

import pytest

from conveyor_gateway.settings import PROGRAM, Settings
from conveyor_process.settings import SettingsError


def test_without_flags_and_variables_the_defaults_hold() -> None:
    assert PROGRAM.parse([], {}) == Settings()


def test_a_flag_wins_over_a_variable_and_a_variable_over_the_default() -> None:
    environment = {"CONVEYOR_GATEWAY_PORT": "1000", "CONVEYOR_GATEWAY_ADMIN_PORT": "2000"}
    settings = PROGRAM.parse(["--port", "3000"], environment)
    assert (settings.port, settings.admin_port) == (3000, 2000)


def test_lists_have_commas_between() -> None:
    settings = PROGRAM.parse(["--watch-namespaces=team-a, team-b", "--public-hosts=Example.com"], {})
    assert settings.watch_namespaces == ("team-a", "team-b")
    assert settings.public_hosts == ("example.com",)


def test_empty_lists_are_all_and_none() -> None:
    settings = PROGRAM.parse(["--watch-namespaces=", "--public-hosts="], {})
    assert (settings.watch_namespaces, settings.public_hosts) == ((), ())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port=http"], "flag --port: `port` must be a port number from 0 to 65535, not 'http'"),
        (["--port=65536"], "from 0 to 65535"),
        (["--allowed-origins=https://a/b"], "`allowed_origins` must be origins SCHEME://HOST[:PORT] or * with commas"),
        (["--trusted-proxies=10.0.0.0/8,10.0.0.1/8"], "`trusted_proxies` must be networks in CIDR notation"),
        (["--trusted-proxies=ingress"], "each without host bits, not 'ingress'"),
        (["--admin-port=-1"], "`admin_port` must be a port number from 0 to 65535, not '-1'"),
        (["--max-request-bytes=0"], "`max_request_bytes` must be a whole number from 1"),
        (["--max-request-bytes=1000", "--max-held-bytes=1999"], "flag --max-held-bytes: `max_held_bytes` is less than"),
        (
            ["--drain-delay-seconds=soon"],
            "`drain_delay_seconds` must be a number of seconds from 0 to 86400",
        ),
        (["--drain-timeout-seconds=nan"], "not 'nan'"),
        (["--drain-timeout-seconds=-1"], "not '-1'"),
        (["--log-level=loud"], "`log_level` must be DEBUG, INFO, WARNING or ERROR, not 'loud'"),
        (["--watch-namespaces=team-a,team_b"], "must be names of namespaces with commas between, not 'team_b'"),
        (["--watch-namespaces=team.a"], "not 'team.a'"),
        (["--public-hosts=https://a"], "`public_hosts` must be DNS names with commas between, not 'https://a'"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_by_name(arguments: list[str], words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        PROGRAM.parse(arguments, {})
    assert words in str(caught.value)


def test_an_unknown_variable_is_refused() -> None:
    with pytest.raises(SettingsError, match="CONVEYOR_GATEWAY_PROT"):
        PROGRAM.parse([], {"CONVEYOR_GATEWAY_PROT": "80"})


def test_an_unknown_flag_ends_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        PROGRAM.parse(["--prot=80"], {})
    assert "--prot" in capsys.readouterr().err


def test_help_names_every_setting_with_its_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        PROGRAM.parse(["--help"], {})
    text = capsys.readouterr().out
    for name in Settings.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in text
        assert f"$CONVEYOR_GATEWAY_{name.upper()}" in text
