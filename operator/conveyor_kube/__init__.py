"""What operator, gateway and metrics server have in common as processes: watching, HTTP serving."""
