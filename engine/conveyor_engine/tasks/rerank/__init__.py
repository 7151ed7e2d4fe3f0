"""Scores how well documents fit a query, in one step each."""
