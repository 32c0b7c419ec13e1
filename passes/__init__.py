"""Rewrites of the step graph, one a file; no pass imports another."""
