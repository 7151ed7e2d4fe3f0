"""Objectives for latency under traffic that changes: in virtual time, and on this machine."""
