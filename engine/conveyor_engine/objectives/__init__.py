"""Objectives for latency: adapts the limits of steps to the traffic, so that latencies stay within the objectives."""
