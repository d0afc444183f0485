"""Handing prompts over between workers."""
