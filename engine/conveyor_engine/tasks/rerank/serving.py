"""Serves the paths of models that rank documents."""

from collections.abc import Sequence
from typing import Final

from conveyor_engine.serving.http.comparing import ComparisonResponse, build_comparison_paths, needs_pairs
from conveyor_engine.serving.http.scores import activate, describe_labels
from conveyor_engine.serving.http.task_paths import TaskPaths
from conveyor_engine.serving.http.tokens import TOKEN_PATHS
from conveyor_engine.tasks.rerank.preparing import PreparedPairs
from conveyor_engine.wire.classification import read_logits


class PairsResponse(ComparisonResponse):
    """A response with the model's score for each pair."""

    def _score(self, payloads: Sequence[bytes]) -> list[float]:
        assert isinstance(self._comparison, PreparedPairs)
        activation = self._comparison.activation
        return [activate(read_logits(payload), activation)[0] for payload in payloads]


TASK: Final = TaskPaths(
    (*build_comparison_paths(PairsResponse), *TOKEN_PATHS),
    inputs_bytes_max=4 * 2**20,  # half of a gateway's default limit for a body
    refine=needs_pairs,
    describe_for_tei=lambda facts: {"reranker": describe_labels(facts)},
)
