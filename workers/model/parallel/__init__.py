"""One model on several devices: tensor, pipeline and expert parallel, one process (rank) per device.

``split.py`` says which part of the model a rank has, ``shards.py`` reads it, ``group.py`` adds and passes tensors
between ranks, ``place.py`` is what a decoder sees of all that. ``ranks.py`` starts the other ranks from the worker's
own process, rank 0, ``rank.py`` is what they run, ``seams.py`` puts saved blocks together, and ``spread.py`` makes one
runner of them all.
"""
