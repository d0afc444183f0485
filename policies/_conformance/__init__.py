"""The suites behind ``policies.testing``, which is what a plugin author imports."""
