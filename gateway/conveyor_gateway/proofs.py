"""Finds the caller of a request by the key or the token in its headers. Used by `listening`.

Clients of OpenAI's API send keys as `Authorization: Bearer`, those of Anthropic's as `x-api-key`. A key in the URL is
ignored, because URLs are logged. The texts of keys and tokens are not kept, logged or forwarded.
"""

from typing import Final

from multidict import CIMultiDictProxy, istr

from conveyor_gateway.watching.issuer import Issuer
from conveyor_gateway.watching.keys import KeyTable, Proof

_AUTHORIZATION: Final = istr("Authorization")
_API_KEY: Final = istr("X-Api-Key")
_BEARER: Final = "bearer"
_NONE: Final = Proof(None)
_SEVERAL: Final = Proof(None, "the request has a header with a key more than once")
_NO_KEY: Final = Proof(None, "this is neither a key of an APIKey nor a token of a ServiceAccount")


class Proofs:
    """Finds callers in the watched APIKeys, and by the tokens of ServiceAccounts."""

    def __init__(self, keys: KeyTable, issuer: Issuer) -> None:
        self._keys, self._issuer = keys, issuer

    def find(self, headers: CIMultiDictProxy[str]) -> Proof:
        """Return the caller, or why the request proves none.

        A header that occurs twice proves nothing: a proxy in front may have read the other one.
        """
        if _AUTHORIZATION not in headers and _API_KEY not in headers:
            return _NONE
        rejected = _NONE
        for name in (_AUTHORIZATION, _API_KEY):
            texts = headers.getall(name, ())
            if len(texts) > 1:
                return _SEVERAL
            for text in texts:
                proof = self._find(_remove_scheme(text) if name is _AUTHORIZATION else text.strip())
                if proof.caller is not None:
                    return proof
                rejected = rejected if rejected.problem else proof
        return rejected

    def _find(self, text: str) -> Proof:
        return self._keys.find(text) or self._issuer.find(text) or _NO_KEY


def _remove_scheme(text: str) -> str:
    """Return the credentials behind the scheme Bearer; "" for another scheme."""
    scheme, _, credentials = text.partition(" ")
    return credentials.strip() if scheme.lower() == _BEARER else ""
