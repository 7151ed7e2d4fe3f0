"""Downloads a model's files to this pod's disk."""
