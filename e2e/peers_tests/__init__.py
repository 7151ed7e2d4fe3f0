"""vLLM's own tests of its server, run unmodified against the engine: `python -m e2e.peers_tests`.

vLLM's source, its dependencies and the models that stand for those of its tests are made in the cache.
"""
