"""Measures how hostile clients, tenants and engines affect others."""
