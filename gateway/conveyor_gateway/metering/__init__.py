"""Limits of requests and tokens for callers, and the counts of what each caller has used."""
