"""Paths that an engine of one task refuses."""

from conveyor_api.endpoints import ENDPOINTS


def list_paths(models: str) -> list[str]:
    """Those for models that do not do what these `models` do. The paths that name a model take tensors; those have
    tests of their own."""
    return [each.path for each in ENDPOINTS if each.models and each.models != models and not each.has_model]
