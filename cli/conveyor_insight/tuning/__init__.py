"""Finds the batch limit, window and step budget with which a service has the most goodput within its objectives."""
