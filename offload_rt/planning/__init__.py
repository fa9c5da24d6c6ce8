"""Forecasts of models on machines that may be absent."""
