"""HTTP with limits, for ports that anybody can reach and for responses from untrusted servers.

`server` listens, `connection` limits what a client may send and leave unread, and `reading` reads a response up to a
size. Used by the gateway, the metrics server and the operator. This package does not know Kubernetes' resources.
"""
