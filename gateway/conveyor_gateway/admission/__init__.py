"""The queue of each service: who waits, in which order, and which engine has a place."""
