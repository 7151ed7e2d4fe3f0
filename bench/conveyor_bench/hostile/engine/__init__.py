"""Measures how a hostile client affects other clients of an engine."""
