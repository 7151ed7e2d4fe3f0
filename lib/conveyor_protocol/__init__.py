"""The protocol between the programs: pages, request headers, error codes, reasons for an engine's exit.

Imported by operator, gateway, metrics server and engine. Needs no library but msgspec.
"""
