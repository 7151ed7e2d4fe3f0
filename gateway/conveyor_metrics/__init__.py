"""The custom.metrics.k8s.io server: answers the HPA by asking the gateways at query time."""
