"""The children of an InferenceService, built from its spec. Pure: spec in, dictionaries out.

One module per group of kinds; `desired` puts them together. Nothing here looks at the cluster: what depends on it (the
image that was chosen, the claim's access mode, replicas) is an argument or is added later.
"""
