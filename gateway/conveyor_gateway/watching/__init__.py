"""The gateway's view of the cluster."""
