"""The task that classifies images. Each image takes one step."""
