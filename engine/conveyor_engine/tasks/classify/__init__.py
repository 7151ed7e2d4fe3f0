"""Says which labels fit texts, in one step each."""
