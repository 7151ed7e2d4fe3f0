"""The engine process: it schedules, executes and updates, step after step."""
