"""For every test: property tests draw the same examples each time, so that CI needs no luck."""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
