"""Pages that the gateway answers itself."""
