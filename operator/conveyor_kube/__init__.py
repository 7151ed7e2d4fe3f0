"""What operator, gateway and metrics server share: watching the API server, and serving HTTP."""
