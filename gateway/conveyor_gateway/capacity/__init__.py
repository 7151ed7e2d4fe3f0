"""Limits the requests and bytes that this gateway holds, with a share for each service and client."""
