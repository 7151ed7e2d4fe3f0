"""The protocol between the programs: pages, request headers, error codes and reasons for an engine's exit.

Used by operator, gateway, metrics server and engine. Needs no library except msgspec.
"""
