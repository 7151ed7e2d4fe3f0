"""The task that embeds: it computes one vector for each prompt, in one step."""
