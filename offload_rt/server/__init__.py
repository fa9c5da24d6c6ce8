"""OpenAI-compatible HTTP server and web page."""
