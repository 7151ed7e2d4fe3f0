"""The HTTP edge: OpenAI's routes, probes and metrics over an AsyncEngine. Free of torch."""
