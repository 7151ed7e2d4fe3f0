"""Find the batch limit, window and step budget with which a service serves most within its objectives."""
