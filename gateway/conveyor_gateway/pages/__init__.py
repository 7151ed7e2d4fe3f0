"""What the gateway answers itself."""
