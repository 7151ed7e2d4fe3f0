"""Compares the batching modes by the method of Anyscale's article: on this machine, and in virtual time."""
