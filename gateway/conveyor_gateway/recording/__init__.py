"""Log lines and metrics of requests."""
