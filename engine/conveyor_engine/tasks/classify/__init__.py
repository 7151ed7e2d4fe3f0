"""The task that classifies texts, or their tokens. Each text takes one step."""
