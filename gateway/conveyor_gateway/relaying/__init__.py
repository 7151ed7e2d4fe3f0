"""Runs requests for engines: reads the body, queues the request, sends it to an engine and forwards the answer."""
