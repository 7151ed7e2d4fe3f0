"""What the programs say to each other: headers of a request, codes of error answers, reasons for an engine's end.

Imported by operator, gateway, metrics server and engine. Needs no library but Python's own.
"""
