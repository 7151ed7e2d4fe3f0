"""Decodes image files into the numbers that a model reads, within limits. For workers and runners."""
