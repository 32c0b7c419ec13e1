"""Lowerings that turn a planned step graph into a callable."""
