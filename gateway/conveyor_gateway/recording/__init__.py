"""What is said of requests: log lines and metrics."""
