"""What the programs of Conveyor share as processes: settings, the log, and forms that all of them know.

`settings` reads flags and variables, `log` writes every line, `request_headers` has the headers of a request that more
than one program reads, and `answer_codes` the form of a table of error answers.
Imported by operator, gateway, metrics server and engine. Knows none of them, and no library but Python's own.
"""
