"""Explains a service's number of replicas, predicts it for another load or spec, and finds better batch settings.

`hpa` has the arithmetic of the HorizontalPodAutoscaler, which tests compare with the real controller. `explaining` and
`simulate` use it. Used by `kubectl conveyor`. Only `tuning.progress` prints, only `facts` reads the
cluster, and only `tuning` sends requests to a service.
"""
