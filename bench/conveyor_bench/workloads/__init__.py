"""Workloads that only whole runs compare. Called by `engine.command`."""
