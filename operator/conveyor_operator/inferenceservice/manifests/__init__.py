"""Builds the children of an InferenceService from its spec. Pure: a spec in, dictionaries out.

There is one module for each group of kinds, and `desired` calls them. Nothing here reads the cluster. Values that
depend on it (the chosen image, the claim's access mode, replicas) are arguments or are added later.
"""
