"""Finds the batch limit, window and step budget of an engine on this machine, without a cluster."""
