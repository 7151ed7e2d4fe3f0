"""Lists paths that an engine of one task refuses."""

from conveyor_api.endpoints import ENDPOINTS


def list_paths(models: str) -> list[str]:
    """Those for models that do not do what these `models` do. The paths that name a model take tensors; those have
    tests of their own."""
    own = {models, "reads text"}  # which all of them do but those of images
    return [
        each.path
        for each in ENDPOINTS
        if each.models and not own & set(each.models.split(" or ")) and not each.has_model
    ]
