"""The public and the admin port, and the dispatch of their requests."""
