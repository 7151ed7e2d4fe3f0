"""The batching inference engine: one model, one device, one scheduler, four policies. Knows nothing of Kubernetes."""

__version__ = "0.1.0"  # the image has the package's files, not its metadata
