"""The common parts of every program: `settings` reads flags and variables, `log` writes every line, `listening` opens
ports, `running` goes from the first line to the exit code.

Imported by operator, gateway, metrics server and engine. Needs no library but Python's own.
"""
