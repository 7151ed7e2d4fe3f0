"""Tests which tokens prove a ServiceAccount: forged, expired, foreign and huge ones do not."""

import base64
import hmac
import json
import time
from collections.abc import Callable
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from tests.gateway.tokens import ISSUER, NOW_UNIX, Signer, make_claims

from conveyor_gateway.caller import Caller
from conveyor_gateway.watching.issuer import SHORTEST_SECONDS, Issuer
from conveyor_gateway.watching.keys import Proof
from conveyor_tokens import verifier
from conveyor_tokens.verifier import LEEWAY_SECONDS, MAX_TOKEN_CHARACTERS

SIGNER, ANOTHER, ELLIPTIC = Signer(), Signer(), Signer("elliptic", "ES256")  # ANOTHER has the same key id as SIGNER
WEB = Caller("system:serviceaccount:apps:web", "apps")


class Clock:
    """The time of PyJWT and of the issuer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_unix = float(NOW_UNIX)
        clock = self

        class Now(jwt.api_jwt.datetime):  # type: ignore[name-defined, misc]
            @classmethod
            def now(cls, tz: Any = None) -> Any:
                return cls.fromtimestamp(clock.now_unix, tz)

        monkeypatch.setattr(jwt.api_jwt, "datetime", Now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def issuer(clock: Clock) -> Issuer:
    issuer = Issuer(lambda: clock.now_unix)
    issuer.set_keys(ISSUER, [SIGNER.publish(), ELLIPTIC.publish()])
    return issuer


def encode(part: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode()


def encode_deep(start: str) -> str:
    """Return an object that begins with `start`, with arrays nested deeper than Python's limit of 1,000 calls."""
    return base64.urlsafe_b64encode(f"{start}{'[' * 1100}{']' * 1100}}}".encode()).rstrip(b"=").decode()


def forge_with_public_key() -> str:
    """Sign with the published key as if it were a secret (HS256)."""
    public = SIGNER.private.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    signed = f"{encode({'alg': 'HS256', 'typ': 'JWT', 'kid': SIGNER.kid})}.{encode(make_claims())}"
    digest = hmac.digest(public, signed.encode(), "sha256")
    return f"{signed}.{base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"


def forge_without_signature(algorithm: str) -> str:
    return f"{encode({'alg': algorithm, 'typ': 'JWT', 'kid': SIGNER.kid})}.{encode(make_claims())}."


def change_claims(**changes: Any) -> str:
    """Return a valid token whose claims were changed afterwards."""
    head, _, signature = SIGNER.sign().split(".")
    return f"{head}.{encode(make_claims(**changes))}.{signature}"


@pytest.mark.parametrize("signer", [SIGNER, ELLIPTIC], ids=["RS256", "ES256"])
def test_a_token_of_the_cluster_proves_its_service_account(issuer: Issuer, signer: Signer) -> None:
    token = signer.sign()
    assert issuer.find(token) == Proof(WEB)
    assert issuer.find(token) == Proof(WEB), "the second time from memory"
    assert issuer.find(signer.sign(aud="conveyor")) == Proof(WEB)
    assert issuer.find(signer.sign(aud=["api", "conveyor"])) == Proof(WEB)
    assert WEB.is_account
    assert WEB.account == "apps/web"


ATTACKS: dict[str, Callable[[], str]] = {
    "expired": lambda: SIGNER.sign(exp=NOW_UNIX - LEEWAY_SECONDS - 1),
    "from the future": lambda: SIGNER.sign(nbf=NOW_UNIX + LEEWAY_SECONDS + 1),
    "issued in the future": lambda: SIGNER.sign(iat=NOW_UNIX + LEEWAY_SECONDS + 1),
    "never expires": lambda: SIGNER.sign(exp=None),
    "for the API server": lambda: SIGNER.sign(aud=["https://kubernetes.default.svc"]),
    "for nobody": lambda: SIGNER.sign(aud=None),
    "for somebody whose name begins alike": lambda: SIGNER.sign(aud=["conveyor2", "convey"]),
    "a gateway's for engines, replayed": lambda: SIGNER.sign(aud=["conveyor/apps"]),
    "of another issuer": lambda: SIGNER.sign(iss="https://accounts.example.com"),
    "of no issuer": lambda: SIGNER.sign(iss=None),
    "of a person": lambda: SIGNER.sign(sub="jane"),
    "of a node": lambda: SIGNER.sign(sub="system:node:apps"),
    "of an account with another form": lambda: SIGNER.sign(sub="system:serviceaccount:apps:web:extra"),
    "of an account with a line break": lambda: SIGNER.sign(sub="system:serviceaccount:apps:web\n"),
    "of no subject": lambda: SIGNER.sign(sub=None),
    "signed with another key": ANOTHER.sign,
    "alg none": lambda: forge_without_signature("none"),
    "alg None": lambda: forge_without_signature("None"),
    "no signature": lambda: forge_without_signature("RS256"),
    "alg HS256 with the public key": forge_with_public_key,
    "another kid": lambda: SIGNER.sign({"kid": ELLIPTIC.kid}),
    "kid of another type": lambda: f"{encode({'alg': 'RS256', 'kid': [SIGNER.kid]})}.{encode(make_claims())}.AAAA",
    "key in the header": lambda: ANOTHER.sign({"jwk": ANOTHER.publish(), "jku": "https://evil.example/keys"}),
    "critical extension": lambda: SIGNER.sign({"crit": ["exp"], "exp": 1}),
    "changed account": lambda: change_claims(sub="system:serviceaccount:kube-system:admin"),
    "cut signature": lambda: SIGNER.sign()[:-4],
    "no JSON": lambda: "eyJhbGciOiJ.eyJhbGciOiJ.AAAA",
    "no object": lambda: f"{encode({'alg': 'RS256', 'kid': SIGNER.kid})}.{encode({})[:2]}bnVsbA.AAAA",
    "deep": lambda: (
        f"{encode({'alg': 'RS256', 'kid': SIGNER.kid})}.{base64.urlsafe_b64encode(b'[' * 2000).decode()}.AAAA"
    ),
    "deep claims of a known key": lambda: ".".join((SIGNER.sign().partition(".")[0], encode_deep('{"iss": '), "AAAA")),
    "deep header": lambda: ".".join((encode_deep('{"alg": "RS256", "x": '), encode(make_claims()), "AAAA")),
    "huge": lambda: SIGNER.sign(padding="x" * MAX_TOKEN_CHARACTERS),
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_no_other_token_proves_anything(issuer: Issuer, attack: Callable[[], str]) -> None:
    token = attack()
    proof = issuer.find(token)
    assert proof is None or (proof.caller, bool(proof.problem)) == (None, True)
    assert token.startswith("eyJ")
    assert issuer._verifier._remembered == {}


@pytest.mark.parametrize("text", ["", "eyJ", "eyJ.a.b c", "a.b.c", "eyJa.b.c.d", "sk-proj-abc"])
def test_what_is_no_token_is_left_to_others(issuer: Issuer, text: str) -> None:
    assert issuer.find(text) is None


def test_clocks_may_differ_a_little(issuer: Issuer) -> None:
    assert issuer.find(SIGNER.sign(exp=NOW_UNIX - LEEWAY_SECONDS + 1)) == Proof(WEB)
    early = {"nbf": NOW_UNIX + LEEWAY_SECONDS, "iat": NOW_UNIX + LEEWAY_SECONDS}
    assert issuer.find(SIGNER.sign(**early)) == Proof(WEB)


def test_a_remembered_token_expires(issuer: Issuer, clock: Clock) -> None:
    token = SIGNER.sign()
    assert issuer.find(token) == Proof(WEB)
    clock.now_unix += 3600 + LEEWAY_SECONDS - 1
    assert issuer.find(token) == Proof(WEB)
    clock.now_unix += 1
    proof = issuer.find(token)
    assert proof is not None
    assert proof.caller is None


def test_a_rotation_of_keys_is_followed(issuer: Issuer, clock: Clock) -> None:
    """The new key is published, then used; then the old one ends."""
    old, new = SIGNER.sign(), Signer("second")
    issuer.set_keys(ISSUER, [SIGNER.publish(), new.publish()])
    assert [issuer.find(token) for token in (old, new.sign())] == [Proof(WEB)] * 2
    issuer.set_keys(ISSUER, [new.publish()])
    clock.now_unix += 1
    proof = issuer.find(old)
    assert proof is not None
    assert proof.caller is None, "the former key's tokens are not remembered"
    assert issuer.find(new.sign()) == Proof(WEB)


def test_an_unknown_key_asks_for_new_ones_and_the_client_retries_only_if_they_are_old(
    issuer: Issuer, clock: Clock
) -> None:
    issuer.note_attempt()
    new = Signer("second")
    proof = issuer.find(new.sign())
    assert proof is not None
    assert (proof.caller, proof.is_pending, issuer.wanted.is_set()) == (None, False, True)
    clock.now_unix += 60
    proof = issuer.find(new.sign())
    assert proof is not None
    assert proof.is_pending
    issuer.set_keys(ISSUER, [new.publish()])
    assert issuer.find(new.sign()) == Proof(WEB)


def test_a_token_is_rejected_as_soon_as_an_attempt_to_read_keys_has_failed(clock: Clock) -> None:
    """Otherwise a client would retry for as long as the gateway cannot read the keys."""
    issuer, token = Issuer(lambda: clock.now_unix), SIGNER.sign()
    issuer.begin()

    def is_pending() -> bool:
        proof = issuer.find(token)
        assert proof is not None
        assert proof.caller is None
        return proof.is_pending

    assert is_pending(), "the first attempt has not ended"
    for _ in range(3):
        issuer.note_attempt()
        assert not is_pending()
        clock.now_unix += SHORTEST_SECONDS
        assert is_pending(), "another attempt begins at once"


def test_where_nobody_reads_keys_a_token_is_rejected() -> None:
    proof = Issuer().find(SIGNER.sign())
    assert proof is not None
    assert (proof.caller, proof.is_pending) == (None, False)


@pytest.mark.parametrize(
    "published",
    [{}, {"kid": "a"}, {"kid": 1, "alg": "RS256"}, {"kid": "a", "alg": "none", "kty": "oct", "k": "AAAA"},
     {"kid": "a", "alg": "HS256", "kty": "oct", "k": "AAAA"}, {"kid": "a", "alg": "RS256", "kty": "RSA", "n": "!"}],
    ids=str,
)  # fmt: skip
def test_keys_that_kubernetes_does_not_sign_with_are_left_out(published: dict[str, Any]) -> None:
    issuer = Issuer()
    issuer.set_keys(ISSUER, [published, SIGNER.publish()])
    assert issuer._verifier.num_keys == 1


def test_what_is_remembered_is_bounded(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier, "MAX_REMEMBERED", 3)
    for number in range(10):
        assert issuer.find(ELLIPTIC.sign(jti=str(number))) == Proof(WEB)
        assert len(issuer._verifier._remembered) <= 3


def test_forged_tokens_are_cheap() -> None:
    """1,000 a second cost less than half a processor, on any machine that runs these tests."""
    issuer = Issuer()
    issuer.set_keys(ISSUER, [SIGNER.publish()])
    tokens = [ANOTHER.sign(jti=str(number)) for number in range(100)]
    began = time.process_time()
    assert not [token for token in tokens if (proof := issuer.find(token)) is None or proof.caller is not None]
    assert (time.process_time() - began) / len(tokens) < 0.0005
