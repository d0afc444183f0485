"""The model side of a worker: the only place with torch. Importing this package alone imports none of it.

``from workers.model.loading import load`` makes a runner; the other modules say what they hold in their first line.
"""
