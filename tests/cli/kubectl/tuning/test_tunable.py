"""Tests what `tune` refuses before it reads from the cluster."""

import argparse

import pytest
from tests.api.builders import build_body

from conveyor_api.resource import InferenceService
from conveyor_insight.facts import Unanswered
from conveyor_kubectl.tuning import _check_tunable


def test_a_service_of_images_is_not_tuned_with_texts() -> None:
    service = InferenceService.parse(build_body(task="ImageClassify"))
    with pytest.raises(Unanswered, match="qwen has task ImageClassify, and a tune sends texts: Generate, Embed"):
        _check_tunable(service, argparse.Namespace(replica=True))
