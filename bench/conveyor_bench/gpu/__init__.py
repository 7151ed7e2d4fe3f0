"""Measures everything that needs a GPU, in stages of a few minutes."""
