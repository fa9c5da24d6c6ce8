"""Weight formats of tests."""
