"""``bench tables``: the tables by which engines are usually compared, measured anew on this machine.

One module per table; each has ``run(lab, sizes) -> list[Table]``. ``TABLES`` in ``catalogue.py`` lists them.
"""
