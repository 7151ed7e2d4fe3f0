"""The task that generates text: it continues prompts token by token."""
