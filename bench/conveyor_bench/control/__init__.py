"""Measures the operator, and gateway and operator together, on a real API server."""
