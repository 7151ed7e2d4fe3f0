"""What the autoscaler would do: a HorizontalPodAutoscaler, gateways and engines on a clock of their own.

`command` is `python -m conveyor_operator simulate`. Pure but for it: no cluster is asked, and no time passes.
"""
