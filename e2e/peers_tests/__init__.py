"""Runs vLLM's own tests of its server, unmodified, against the engine: `python -m e2e.peers_tests`.

vLLM's source, its dependencies, and models that replace those of its tests are made in the cache.
"""
