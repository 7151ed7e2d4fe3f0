"""The protocol between the programs: pages, request headers, error codes and reasons for an engine's exit.

Needs no library except msgspec.
"""
