"""msgspec's structs as dataclasses, for a machine without msgspec. Called by `stage` before the engine is imported.

They are enough for an engine in one process. Whatever encodes messages needs msgspec itself: `msgpack` and `json` are
missing here. Objects are made more slowly, so a result says it (`about`). A plugin of pytest too, for its workers.
"""

import dataclasses
import importlib.util
import sys
from types import ModuleType
from typing import Any


class Struct:
    """The base class; of its options those count that change what Python code sees."""

    def __init_subclass__(cls, kw_only: bool = False, frozen: bool = False, **_: Any) -> None:
        dataclasses.dataclass(kw_only=kw_only, unsafe_hash=frozen)(cls)


def pytest_configure() -> None:
    """In each process of pytest, before it imports tests."""
    install()


def install() -> bool:
    """Puts them in msgspec's place if it is not installed. Returns whether they are there."""
    if "msgspec" not in sys.modules and importlib.util.find_spec("msgspec") is None:
        module, structs = ModuleType("msgspec"), ModuleType("msgspec.structs")
        structs.replace = dataclasses.replace  # type: ignore[attr-defined]
        for name, value in (("Struct", Struct), ("field", dataclasses.field), ("structs", structs)):
            setattr(module, name, value)
        sys.modules.update({"msgspec": module, "msgspec.structs": structs})
    return getattr(sys.modules.get("msgspec"), "Struct", None) is Struct
