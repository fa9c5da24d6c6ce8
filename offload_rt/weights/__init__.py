"""Weight formats and checkpoint reading."""
