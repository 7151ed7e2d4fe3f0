"""Fixtures for a namespace in which tests write InferenceServices and EndpointSlices themselves."""

import pytest
from tests.gateway.cluster import Cluster

from e2e.cluster.api import Api


@pytest.fixture
def cluster(crd: Api, namespace: str) -> Cluster:
    return Cluster(crd, namespace)
