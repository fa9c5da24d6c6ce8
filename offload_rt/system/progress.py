"""Progress bars, shown only in a terminal."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import progress
from rich.console import Console

_SECONDS_BETWEEN_DRAWS = 0.1
Draw = Callable[[int, int], None]


@contextmanager
def progress_bar(console: Console, title: str, *columns: progress.ProgressColumn) -> Iterator[Draw]:
    """Show a bar; yields a function of (completed, total)."""
    drawn = 0.0

    def draw(done: int, total: int) -> None:
        nonlocal drawn
        now = time.perf_counter()
        if done >= total or now - drawn > _SECONDS_BETWEEN_DRAWS:
            drawn = now
            bar.update(task, completed=done, total=total, refresh=True)

    # Drawn by the caller: an interrupt can break the wait for a separate drawing thread.
    shown = progress.TextColumn(title), progress.BarColumn(), *columns, progress.TimeElapsedColumn()
    with progress.Progress(
        *shown, console=console, disable=not console.is_terminal, auto_refresh=False
    ) as bar:
        task = bar.add_task(title, total=None)
        yield draw


@contextmanager
def loading_bar(console: Console, verb: str = "loaded") -> Iterator[Draw]:
    """Show GB and GB/s; yields a function of (bytes, total bytes). In log files, a final line."""
    started = loaded = 0.0

    def draw(done: int, total: int) -> None:
        nonlocal started, loaded
        # Planning and opening precede the first byte and do not count for the rate.
        started = started or time.perf_counter()
        loaded = total
        bar(done, total)

    with progress_bar(
        console, verb, progress.DownloadColumn(), progress.TransferSpeedColumn()
    ) as bar:
        yield draw
    if loaded and not console.is_terminal:
        seconds = time.perf_counter() - started
        rate = loaded / seconds / 1e9
        console.print(
            f"{verb} {loaded / 1e9:.2f} GB in {seconds:.2f} s, {rate:.2f} GB/s", highlight=False
        )
