"""Explains why a service has its replicas, and predicts them for another load or another spec.

`hpa` has the arithmetic of the HorizontalPodAutoscaler, which tests compare with the real controller. `explaining`,
`replaying` and `simulate` use it. Used by `kubectl conveyor`. Nothing here prints, and only `facts` reads the cluster.
"""
