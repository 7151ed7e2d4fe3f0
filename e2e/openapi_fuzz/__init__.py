"""Sends generated requests to each route of an OpenAPI document, and checks the responses: `python -m
e2e.openapi_fuzz`.

Schemathesis generates the requests, in its own environment. One engine for each task serves a tiny random model.
"""
