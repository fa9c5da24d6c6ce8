"""The one generation loop."""
