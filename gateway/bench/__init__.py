"""``forebay bench``: how fast the engine is, beside what the machine could do and what others do on it.

Rules
- A tool, not part of serving: modules here may import ``workers.engine`` and ``workers.model``, and do so only when
  they run. ``load``, ``pump`` and ``peers/drive_*`` use the standard library only: another engine's interpreter runs
  them.
- Everybody is driven by the same pump (``pump.py``) and measured by the same arithmetic (``metrics.py``).
- No two requests of a run, its warm-up or its repetitions share a prompt unless the load is about sharing: a prefix
  cache must not be able to fake speed.
"""
