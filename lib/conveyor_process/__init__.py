"""The common parts of every program.

`settings` reads flags and variables, `log` writes log lines, `listening` opens ports, and `running` runs a program from
its settings to its exit code. Needs only Python's standard library.
"""
