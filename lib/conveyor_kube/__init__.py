"""Reads and watches Kubernetes objects, for the operator, the gateway and the metrics server."""
