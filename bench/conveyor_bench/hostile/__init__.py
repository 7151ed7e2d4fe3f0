"""Measures what others get beside hostile clients, tenants and engines."""
