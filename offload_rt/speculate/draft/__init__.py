"""Drafters, one file each."""
