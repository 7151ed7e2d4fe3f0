"""`spec.speculation`: drafts of the next tokens of answers."""

import re
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from conveyor_api.base import ApiModel, Rule
from conveyor_api.model import CLIMBS, DOWNLOAD_OR_CLAIM_PATTERN, is_valid_uri

_PLACE: Final = "^pvc://[^/]+/|^..://"
SpeculationMethod = Literal["NGram", "Draft", "MTP"]


class DraftModel(ApiModel):
    """A smaller model, or an EAGLE-3 head."""

    uri: Annotated[
        str,
        Field(min_length=1, max_length=512),
        Rule(
            f"self.matches('{DOWNLOAD_OR_CLAIM_PATTERN}') && !self.matches('{CLIMBS}')",
            "must have a form of model.uri, but not oci://",
            lambda uri: is_valid_uri(uri, DOWNLOAD_OR_CLAIM_PATTERN),
        ),
    ]
    """Source; credentials are those of the model."""


class Speculation(ApiModel):
    """Drafts of the next tokens of answers, on CPUs. A step computes drafts only while they save time."""

    rules: ClassVar = (
        Rule(
            "has(self.draft) == (self.method == 'Draft')",
            "method Draft needs draft; others have none",
            lambda speculation: (speculation.draft is not None) == (speculation.method == "Draft"),
        ),
    )

    method: SpeculationMethod
    """NGram: what followed the last tokens earlier. Draft: guesses of `draft`. MTP: the model's own head."""
    draft: DraftModel | None = None
    max_tokens: Annotated[int, Field(ge=1, le=16)] = 8
    """Most drafts of one request in a step."""


DRAFT_RULE: Final = Rule(
    "!has(self.speculation) || !has(self.speculation.draft)"
    f" || self.model.uri.startsWith(self.speculation.draft.uri.find('{_PLACE}'))",
    "draft.uri must begin as model.uri does: with hf://, s3:// or pvc://claim/",
    lambda spec: (
        spec.speculation is None
        or spec.speculation.draft is None
        or _is_beside(spec.speculation.draft.uri, spec.model.uri)
    ),
    field="speculation",
)


def _is_beside(draft: str, model: str) -> bool:
    found = re.search(_PLACE, draft)
    return found is None or model.startswith(found[0])
