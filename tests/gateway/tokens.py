"""Signs tokens as the API server signs those of ServiceAccounts, for tests without a cluster."""

import json
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

ISSUER = "https://kubernetes.default.svc.cluster.local"
NOW_UNIX = 1_800_000_000
Json = dict[str, Any]


class Signer:
    """A key of the API server."""

    def __init__(self, kid: str = "first", algorithm: str = "RS256") -> None:
        self.kid, self.algorithm = kid, algorithm
        self.private: Any = (
            rsa.generate_private_key(65537, 2048) if algorithm == "RS256" else ec.generate_private_key(ec.SECP256R1())
        )

    def publish(self) -> Json:
        """Return the key as the API server publishes it."""
        public = self.private.public_key()
        kind = RSAAlgorithm if self.algorithm == "RS256" else ECAlgorithm
        return {**json.loads(kind.to_jwk(public)), "kid": self.kid, "alg": self.algorithm, "use": "sig"}  # type: ignore[arg-type]

    def sign(self, header: Json | None = None, **changes: Any) -> str:
        """Return the token of the ServiceAccount apps/web. changes: claims; None removes one."""
        claims = make_claims(**changes)
        return jwt.encode(claims, self.private, self.algorithm, headers={"kid": self.kid, **(header or {})})


def make_claims(**changes: Any) -> Json:
    claims = {
        "aud": ["conveyor"],
        "iss": ISSUER,
        "sub": "system:serviceaccount:apps:web",
        "iat": NOW_UNIX - 60,
        "nbf": NOW_UNIX - 60,
        "exp": NOW_UNIX + 3600,
        "jti": "b1f0",
        "kubernetes.io": {"namespace": "apps", "serviceaccount": {"name": "web", "uid": "u"}},
        **changes,
    }
    return {name: value for name, value in claims.items() if value is not None}
