"""The operator: creates the children of InferenceServices and keeps them up to date. Requests do not pass it."""
