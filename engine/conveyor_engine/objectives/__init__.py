"""Objectives for latency: the limits of a step follow the traffic."""
