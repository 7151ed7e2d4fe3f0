"""Measures the engine: tokens per second, the host's part of a step, the time to start, and waiting times."""
