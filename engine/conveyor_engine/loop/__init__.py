"""The engine process: schedule, execute, update, step after step."""
