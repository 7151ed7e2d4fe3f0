"""What the autoscaler would do: a HorizontalPodAutoscaler, gateways and engines on a clock of their own. Pure."""
