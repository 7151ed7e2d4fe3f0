"""Paged attention: the protocol (`backend`), transformers' way in (`interface`), and the backends."""
