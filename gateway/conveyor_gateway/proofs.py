"""Finds the caller of a request by the key or the token in its headers. Used by `listening`.

Clients of OpenAI's API send keys as `Authorization: Bearer`, those of Anthropic's as `x-api-key`. A key in the URL is
ignored, because URLs are logged. The texts of keys and tokens are not kept, logged or forwarded.
"""

from typing import Final

from multidict import CIMultiDictProxy, istr

from conveyor_gateway.watching.issuer import Issuer
from conveyor_gateway.watching.keys import KeyTable, Proof

_BEARER: Final = "bearer "
_NONE: Final = Proof(None)
_SEVERAL: Final = Proof(None, "the request has a header with a key more than once")
_NO_KEY: Final = Proof(None, "this is neither a key of an APIKey nor a token of a ServiceAccount")


def _remove_scheme(text: str) -> str:
    """Return the credentials behind the scheme Bearer; "" for another scheme."""
    return text[len(_BEARER) :].strip() if text[: len(_BEARER)].lower() == _BEARER else ""


_HEADERS: Final = ((istr("Authorization"), _remove_scheme), (istr("X-Api-Key"), str.strip))


class Proofs:
    """Finds callers in the watched APIKeys, and by the tokens of ServiceAccounts."""

    def __init__(self, keys: KeyTable, issuer: Issuer) -> None:
        self._keys, self._issuer = keys, issuer

    def find(self, headers: CIMultiDictProxy[str]) -> Proof:
        """Return the caller, or why the request proves none.

        A header that occurs twice proves nothing: a proxy in front may have read the other one.
        """
        rejected = _NONE
        for name, read in _HEADERS:
            if name not in headers:
                continue
            texts = headers.getall(name)
            if len(texts) > 1:
                return _SEVERAL
            proof = self._find(read(texts[0]))
            if proof.caller is not None:
                return proof
            rejected = rejected if rejected.problem else proof
        return rejected

    def _find(self, text: str) -> Proof:
        return self._keys.find(text) or self._issuer.find(text) or _NO_KEY
