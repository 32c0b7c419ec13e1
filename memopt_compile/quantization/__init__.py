"""Formats of few bits for tensors that stay, and their arithmetic."""
