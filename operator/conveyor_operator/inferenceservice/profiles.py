"""Profiles: fields that the platform team defines, and that a service gets if it names the profile.

The profile `default` is for all services. A profile with `namespaces` does not exist for services of other namespaces.
The service's own fields take precedence, then those of the profile that it names. Maps are merged key by key, and so
are lists whose entries have a key, such as `env`. Another list or a value of the service is kept unchanged. The result
is validated like the spec of a service, so a profile cannot set anything that a service cannot, except annotations that
the node reads. Profiles are read once, at the start. Used by `resource`.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import BaseModel, ValidationError

from conveyor_api.base import KeyedBy
from conveyor_api.errors import InvalidResource, Problem
from conveyor_api.profile import Profile
from conveyor_api.resource import InferenceService
from conveyor_operator.loop.owner import Object

DEFAULT: Final = "default"  # the profile of all services
_MOST_SHOWN, _MOST_CHARACTERS = 64, 253  # the limits of the status's field


class Profiles:
    """The profiles of an installation, by name."""

    def __init__(self, profiles: Mapping[str, Any]) -> None:
        self._profiles = profiles

    def parse(self, body: Object) -> tuple[InferenceService, list[str]]:
        """Return the InferenceService with the fields of its profiles, and the paths of these fields.

        Its own fields must be valid without those of the profiles. Raises InvalidResource.
        """
        filled, paths = self.fill(body)
        if filled is body:
            return InferenceService.parse(body), paths
        InferenceService.parse(body)
        return InferenceService.parse(filled, is_filled=True), paths

    def fill(self, body: Object) -> tuple[Object, list[str]]:
        """Return the body with the fields of its profiles, and the paths of these fields. Raises InvalidResource."""
        spec = body.get("spec")
        if not isinstance(spec, dict):
            return body, []
        allowed, named = self._list_for((body.get("metadata") or {}).get("namespace")), spec.get("profile")
        names = [named] if isinstance(named, str) else []
        names += [DEFAULT] if DEFAULT in allowed and DEFAULT not in names else []
        filled: list[str] = []
        for name in names:
            spec = _fill(spec, self._find(name, allowed), "", filled)
        shown = [path[:_MOST_CHARACTERS] for path in sorted(filled)[:_MOST_SHOWN]]
        return ({**body, "spec": spec} if names else body), shown

    def _list_for(self, namespace: Any) -> list[str]:
        """Return the names of the profiles that services of the namespace may have."""
        limits = {
            name: each.get("namespaces") if isinstance(each, dict) else None for name, each in self._profiles.items()
        }
        return sorted(name for name, limit in limits.items() if not limit or namespace in limit)

    def _find(self, name: str, allowed: Sequence[str]) -> Object:
        if name not in allowed:
            known = ", ".join(allowed) or "none"
            raise _wrong(f"there is no profile {name}; those of the chart (value `profiles`): {known}")
        try:
            context = {"is_filled": True}
            profile = Profile.model_validate(self._profiles[name], by_alias=True, by_name=False, context=context)
            return profile.model_dump(exclude={"namespaces"}, exclude_unset=True, exclude_none=True)
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
        elif here in _KEYS and isinstance(said, list | None):
            merged[name] = _fill_entries(said or [], value, _KEYS[here], here, filled)
        elif said is None:
            merged[name] = value
            filled.append(here)
    return merged


def _fill_entries(own: list[Any], given: list[Object], key: str, path: str, filled: list[str]) -> list[Any]:
    """Return the given entries whose key the service does not have, and then the service's own.

    So a variable of the service may refer to a variable of the profile.
    """
    named = [entry.get(key) for entry in own if isinstance(entry, dict)]
    added = [entry for entry in given if entry[key] not in named]
    filled += [f"{path}[{entry[key]}]" for entry in added]
    return [*added, *own]


def _find_keys(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path of each list with keyed entries that a profile may have, and the name of the key."""
    for name, field in model.model_fields.items():
        here = f"{path}.{field.alias or name}".removeprefix(".")
        yield from ((here, mark.key) for mark in field.metadata if isinstance(mark, KeyedBy))
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _find_keys(field.annotation, here)


_KEYS: Final = dict(_find_keys(Profile))


def _wrong(message: str) -> InvalidResource:
    return InvalidResource((Problem("spec.profile", message),))
