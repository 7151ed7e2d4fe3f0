"""Reads parts of an untrusted JSON object without decoding the rest."""

from typing import Final

import msgspec

Raws = dict[str, msgspec.Raw]  # the fields of an object, whose values are not decoded


class Names:
    """Reads the fields with these names from objects. The decoder skips other fields without building objects."""

    _ABSENT: Final = msgspec.Raw()

    def __init__(self, *names: str) -> None:
        self._names = {f"field_{number}": name for number, name in enumerate(names)}
        fields = [
            (field, msgspec.Raw, msgspec.field(default=self._ABSENT, name=name)) for field, name in self._names.items()
        ]
        self._decoder = msgspec.json.Decoder(msgspec.defstruct("Named", fields))

    def find(self, value: msgspec.Raw | None) -> Raws | None:
        """Return the fields that `value` has, or None if `value` is not a JSON object."""
        try:
            read = None if value is None else self._decoder.decode(value)
        except msgspec.ValidationError:
            read = None
        if read is None:
            return None
        found = {name: getattr(read, field) for field, name in self._names.items()}
        return {name: raw for name, raw in found.items() if raw is not self._ABSENT}

    def read(self, value: msgspec.Raw | None) -> Raws:
        """Like `find`, but empty if `value` is not a JSON object."""
        return self.find(value) or {}


def read_text(value: msgspec.Raw | None) -> str:
    """Return the string; "" if `value` is None or not a string."""
    try:
        return "" if value is None else msgspec.json.decode(value, type=str)
    except msgspec.ValidationError:
        return ""
