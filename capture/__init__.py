"""Graph capture and replay per bucket. Import this package as ``mmgraph.capture``."""

if __name__ != "mmgraph.capture":
    raise ImportError(
        f"this package keeps process-wide capture state and must be imported once, as 'mmgraph.capture', "
        f"not as {__name__!r}: write 'import mmgraph.capture'"
    )
