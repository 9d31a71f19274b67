"""The progress bar of a capture."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from .buckets import Bucket

__all__ = ["progress_bar"]


@contextlib.contextmanager
def progress_bar(show: bool, total: int) -> Iterator[Callable[[Bucket], None]]:
    """Yields what to call after each bucket; draws nothing unless asked to."""
    if not show:
        yield lambda bucket: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("capturing", total=total)
        yield lambda bucket: bar.update(task, advance=1, description=f"captured {dict(bucket)}")
