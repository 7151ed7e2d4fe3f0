"""The formats that answers follow, each as a regular expression. All other formats are annotations. Pure.

Each expression allows only texts that common validators accept: jsonschema, pydantic, Zod and ajv. It may allow fewer
texts than the format's standard, for example no leap seconds.
"""

from collections.abc import Mapping
from typing import Any, Final

_YEAR = r"(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = (
    r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"  # 0000 is none for Python
)
_LONG, _SHORT = r"(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])", r"(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_DAY = rf"(?:{_LONG}|{_SHORT}|02-(?:0[1-9]|1[0-9]|2[0-8]))"
_DATE = rf"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_N = "[0-9]{1,6}"
_SPAN = rf"(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_DAYS = rf"(?:[0-9]{{1,3}}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)"
_DURATION = rf"P(?:[0-9]{{1,3}}W|{_DAYS}(?:T{_SPAN})?|T{_SPAN})"
_LABEL = r"[A-Za-z0-9](?:-?[A-Za-z0-9]){0,31}"  # at most 63 characters, no two hyphens in a row
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_EMAIL = rf"{_ATOM}(?:\.{_ATOM})*@(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?\.)+[A-Za-z]{{2,}}"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_NET4 = rf"(?:{_BYTE}\.0\.0\.0/8|{_BYTE}\.{_BYTE}\.0\.0/16|(?:{_BYTE}\.){{3}}0/24|{_IPV4}/32)"
_H = r"[0-9a-fA-F]{1,4}"
_IPV6 = (
    rf"(?:(?:{_H}:){{7}}{_H}|(?:{_H}:){{1,7}}:|"
    + "|".join(rf"(?:{_H}:){{1,{7 - n}}}(?::{_H}){{1,{n}}}" for n in range(1, 7))
    + rf"|:(?::{_H}){{1,7}}|::)"
)
_NET6 = rf"(?:{_H}:{_H}::/32|(?:{_H}:){{3}}:/48|(?:{_H}:){{4}}:/64|(?:{_H}:){{7}}{_H}/128)"
_UUID = "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-%s-%s-[0-9a-fA-F]{12}"
_ANY_UUID = _UUID % ("[0-9a-fA-F]{4}", "[0-9a-fA-F]{4}")
_CHARACTER = r"(?:[A-Za-z0-9._~!$&'()*+,;=@-]|%[0-9A-Fa-f]{2})"  # of a part of a path, without the colon
_END = rf"(?:\?(?:{_CHARACTER}|[:/?])*)?(?:#(?:{_CHARACTER}|[:/?])*)?"
_AUTHORITY = rf"//(?:{_CHARACTER}*@)?(?:[A-Za-z0-9._~-]+|\[{_IPV6}\])(?::[0-9]{{1,4}})?"
_PATH = rf"(?:/(?:{_CHARACTER}|:)*)*"
_URI = rf"[A-Za-z][A-Za-z0-9+.-]*:(?:{_AUTHORITY}{_PATH}|/?(?:{_CHARACTER}|:)+{_PATH}){_END}"
_REFERENCE = (
    rf"(?:{_URI}|{_AUTHORITY}{_PATH}{_END}|(?:/(?:(?:{_CHARACTER}|:)+{_PATH})?)?{_END}|{_CHARACTER}+{_PATH}{_END})"
)
_POINTER = r"(?:/(?:[^~/]|~[01])*)*"
_VARIABLE = r"\{[+#./;?&]?[A-Za-z0-9_]+(?:,[A-Za-z0-9_]+)*\}"
_BASE64 = "(?:[A-Za-z0-9%s]{4})*(?:[A-Za-z0-9%s]{2}==|[A-Za-z0-9%s]{3}=)?"

FORMATS: Final[Mapping[str, str]] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}T{_TIME}",
    "duration": _DURATION,
    "email": _EMAIL,
    "idn-email": _EMAIL,
    "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
    "idn-hostname": rf"{_LABEL}(?:\.{_LABEL})*",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "ipvanyaddress": f"(?:{_IPV4}|{_IPV6})",
    "ipv4interface": f"{_IPV4}(?:/(?:[12]?[0-9]|3[0-2]))?",
    "ipv6interface": f"{_IPV6}(?:/(?:[1-9]?[0-9]|1[01][0-9]|12[0-8]))?",
    "ipvanyinterface": f"(?:{_IPV4}|{_IPV6})",
    "ipv4network": _NET4,
    "ipv6network": _NET6,
    "ipvanynetwork": f"(?:{_NET4}|{_NET6})",
    "uuid": _ANY_UUID,
    **{f"uuid{number}": _UUID % (f"{number}[0-9a-fA-F]{{3}}", "[89abAB][0-9a-fA-F]{3}") for number in range(1, 9)},
    "uri": _URI,
    "iri": _URI,
    "uri-reference": _REFERENCE,
    "iri-reference": _REFERENCE,
    "uri-template": rf"(?:[A-Za-z0-9._~:/?#@!$&()*+,;=-]|%[0-9A-Fa-f]{{2}}|{_VARIABLE})*",
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9][0-9]{{0,5}})(?:#|{_POINTER})",
    "base64": _BASE64 % (("+/",) * 3),
    "base64url": _BASE64 % (("_-",) * 3),
    "ulid": "[0-7][0-9A-HJKMNP-TV-Z]{25}",
    "jwt": r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+",
}
ENCODINGS: Final = frozenset({"base64", "base64url", "jwt"})  # libraries differ in the padding; a pattern says which
INTEGERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "int8": {"minimum": -(2**7), "maximum": 2**7 - 1},
    "int16": {"minimum": -(2**15), "maximum": 2**15 - 1},
    "int32": {"minimum": -(2**31), "maximum": 2**31 - 1},
    "uint8": {"minimum": 0, "maximum": 2**8 - 1},
    "uint16": {"minimum": 0, "maximum": 2**16 - 1},
    "uint32": {"minimum": 0, "maximum": 2**32 - 1},
}
# Patterns with look-around that libraries write, by texts that fit them. Each fits its pattern exactly, unless noted.
PATTERNS: Final[Mapping[str, str]] = {
    # pydantic: Decimal
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)$",
    # Zod: email
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^[A-Za-z0-9_'+-]+(?:\.[A-Za-z0-9_'+-]+)*[A-Za-z0-9_+-]?@(?:[A-Za-z0-9][A-Za-z0-9-]*\.)+[A-Za-z]{2,}$"
    ),
    # Zod: duration
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": f"^{_DURATION}$",
}
