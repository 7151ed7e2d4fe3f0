"""Workloads of `bench --workload` of which only whole runs tell. Called by `command`."""
