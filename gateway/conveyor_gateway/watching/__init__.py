"""The gateway's view of the cluster: services, their queue classes, served names and ready engines."""
