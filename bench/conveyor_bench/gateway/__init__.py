"""Measures what the gateway adds to a request."""
