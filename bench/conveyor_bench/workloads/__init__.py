"""Workloads whose figures need whole runs. Called by `engine.command`."""
