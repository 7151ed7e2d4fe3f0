"""What the operator, the gateway and the metrics server read from Kubernetes, and how they watch it."""
