"""Turns bodies into engine requests, in worker processes with limits on time and memory."""
