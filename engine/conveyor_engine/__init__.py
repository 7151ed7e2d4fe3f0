"""The batching inference engine: one model, one device, one scheduler with four policies. Knows nothing of Kubernetes."""
