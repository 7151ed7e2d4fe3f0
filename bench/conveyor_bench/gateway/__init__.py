"""Measures the latency and the cost that the gateway adds to requests."""
