"""Simulates the autoscaler with a HorizontalPodAutoscaler, gateways and engines on a simulated clock. Pure."""
