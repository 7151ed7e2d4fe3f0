"""HTTP requests to engines."""
