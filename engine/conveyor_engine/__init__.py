"""The batching inference engine: one model on one or several devices, one scheduler, four policies.

It does not depend on Kubernetes.
"""

__version__ = "0.1.0"  # not read from the package's metadata, which the image does not contain
