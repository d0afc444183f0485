"""``python -m gateway.cli``: the same as the ``forebay`` script, for trees that are not installed."""

from gateway.cli import main

if __name__ == "__main__":
    main()
