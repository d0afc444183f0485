"""Other engines under our loads: each runs in its own interpreter, driven by the same pump, measured by us.

Rules
- A driver (``drive_*``) is started by ``boot.py`` with the peer's Python, whose environment has none of our libraries:
  drivers, ``wire``, ``load`` and ``pump`` use the standard library and the peer, nothing else of ours.
- Our engine is started the same way, as one of them.
- One engine process lives at a time; it has the whole machine.
- Every engine gets the same weights, the same precision for weights and cache, and the same number of threads.
"""
