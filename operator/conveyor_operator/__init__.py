"""The operator: creates and updates the children of InferenceServices. Inference requests do not pass through it."""
