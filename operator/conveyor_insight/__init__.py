"""Why a service has its replicas, and what it would have under another load or another spec.

`hpa` is the arithmetic of the HorizontalPodAutoscaler, held against the real controller; `explaining`, `replaying` and
`simulate` are what is made of it. Used by `kubectl conveyor`. Prints nothing; `facts` alone asks the cluster.
"""
