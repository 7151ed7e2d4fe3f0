"""How many requests and bytes this gateway holds, shared among services and clients."""
