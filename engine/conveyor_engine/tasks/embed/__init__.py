"""Makes one vector of each prompt, in one step."""
