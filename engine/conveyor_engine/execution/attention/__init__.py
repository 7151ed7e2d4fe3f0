"""Paged attention: the protocol (`backend`), the interface to transformers (`interface`), and the backends."""
