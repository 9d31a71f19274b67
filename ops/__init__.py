"""Custom operators: attention, embedding assembly. Import this package as ``mmgraph.ops``."""

if __name__ != "mmgraph.ops":
    raise ImportError(
        f"this package registers operators and must be imported once, as 'mmgraph.ops', not as {__name__!r}: "
        "write 'import mmgraph.ops'"
    )
