"""Profiles: fields that the platform team defines, and that a service gets if it names the profile.

The service's own fields take precedence. Maps are merged key by key. A list or a value of the service is kept
unchanged. The result is validated like the spec of a service, so a profile cannot set anything that a service cannot.
Profiles are read once, at the start. Used by `resource`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from conveyor_api.errors import InvalidResource, Problem
from conveyor_api.profile import Profile
from conveyor_operator.loop.owner import Object

_MOST_TOLD = 64  # the limit of the status's field


class Profiles:
    """The profiles of an installation, by name."""

    def __init__(self, profiles: Mapping[str, Any]) -> None:
        self._profiles = profiles

    def fill(self, body: Object) -> tuple[Object, list[str]]:
        """Return the InferenceService with its profile's fields, and the paths of these fields.

        Raises InvalidResource.
        """
        spec = body.get("spec")
        name = spec.get("profile") if isinstance(spec, dict) else None
        if not isinstance(spec, dict) or not isinstance(name, str):
            return body, []
        filled: list[str] = []
        given = self._find(name)
        return {**body, "spec": _fill(spec, given, "", filled)}, sorted(filled)[:_MOST_TOLD]

    def _find(self, name: str) -> Object:
        if name not in self._profiles:
            known = ", ".join(sorted(self._profiles)) or "none"
            raise _wrong(f"there is no profile {name}; those of the chart (value `profiles`): {known}")
        try:
            return Profile.model_validate(self._profiles[name], by_alias=True, by_name=False).model_dump(
                exclude_unset=True, exclude_none=True
            )
        except ValidationError as error:
            raise _wrong(
                f"profile {name} of the chart (value `profiles`) is invalid: {InvalidResource.of(error)}"
            ) from error


def read_profiles(file: Path | None) -> Profiles:
    """Read profiles by name from a YAML file. Raises OSError and yaml.YAMLError."""
    return Profiles((yaml.safe_load(file.read_text(encoding="utf-8")) if file is not None else None) or {})


def _fill(own: Object, given: Object, path: str, filled: list[str]) -> Object:
    merged = dict(own)
    for name, value in given.items():
        here, said = f"{path}.{name}".removeprefix("."), own.get(name)
        if isinstance(value, dict) and isinstance(said, dict | None):
            merged[name] = _fill(said or {}, value, here, filled)
        elif said is None:
            merged[name] = value
            filled.append(here)
    return merged


def _wrong(message: str) -> InvalidResource:
    return InvalidResource((Problem("spec.profile", message),))
