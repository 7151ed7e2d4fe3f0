"""What every program of Conveyor is as a process: how it is told what to do (`settings`), and what it logs (`log`).

Besides, what the headers of a request say to each of them (`request_headers`), and what a table of error answers is
(`answer_codes`).

Imported by operator, gateway, metrics server and engine. Knows none of them, and no library but Python's own.
"""
