"""The two ports, and which requests go where."""
