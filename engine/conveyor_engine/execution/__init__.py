"""The device: one step of the model, from token ids to sampled tokens or vectors."""
