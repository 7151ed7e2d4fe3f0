"""A namespace in which InferenceServices and EndpointSlices are written by hand."""

import pytest
from tests.gateway.cluster import Cluster

from e2e.cluster.api import Api


@pytest.fixture
def cluster(crd: Api, namespace: str) -> Cluster:
    return Cluster(crd, namespace)
