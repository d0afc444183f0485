"""``/console`` on the admin listener: pages for operators, rendered here, live by server-sent events.

``app.py`` has the routes, ``access.py`` decides who may use them, ``actions.py`` changes things, ``live.py`` streams,
``render.py`` turns values into HTML. What is shown comes from ``gateway.console_data`` and its siblings.
"""
