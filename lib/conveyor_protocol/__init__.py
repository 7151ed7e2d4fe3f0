"""What the programs say to each other: pages, headers of a request, codes of errors, reasons for an engine's end.

Imported by operator, gateway, metrics server and engine. Needs no library but msgspec.
"""
