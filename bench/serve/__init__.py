"""The HTTP server under load."""
