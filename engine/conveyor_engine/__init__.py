"""The batching inference engine: one model, one device, one scheduler, four policies. Knows nothing of Kubernetes."""
