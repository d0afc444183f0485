"""``forebay eval``: what a lossy switch costs, on small tasks that run for real, before it goes live."""
