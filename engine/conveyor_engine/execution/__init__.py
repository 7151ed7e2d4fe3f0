"""Computes one step of the model on the device, from token ids to sampled tokens or vectors."""
