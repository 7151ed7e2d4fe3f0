"""Measures the engine: tokens per second, the host's part of a step, starts, waits."""
