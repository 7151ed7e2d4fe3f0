"""The queue for each service: which requests wait, in which order, and which engine has a place."""
