"""``python -m mmgraph`` is the ``mmgraph`` command."""

from mmgraph.cli import main

if __name__ == "__main__":
    main()
