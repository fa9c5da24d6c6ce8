"""Progress bars. Where the console is no terminal there is none."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import progress
from rich.console import Console

_SECONDS_BETWEEN_DRAWS = 0.1
Draw = Callable[[int, int], None]


@contextmanager
def progress_bar(console: Console, what: str, *columns: progress.ProgressColumn) -> Iterator[Draw]:
    """A bar, to be called with (done so far, in all)."""
    drawn = 0.0

    def draw(done: int, total: int) -> None:
        nonlocal drawn
        now = time.perf_counter()
        if done >= total or now - drawn > _SECONDS_BETWEEN_DRAWS:
            drawn = now
            bar.update(task, completed=done, total=total, refresh=True)

    # The caller draws it: an interrupt can break the wait for a thread of the bar's own.
    shown = progress.TextColumn(what), progress.BarColumn(), *columns, progress.TimeElapsedColumn()
    with progress.Progress(*shown, console=console, disable=not console.is_terminal, auto_refresh=False) as bar:
        task = bar.add_task(what, total=None)
        yield draw


@contextmanager
def loading_bar(console: Console, done_what: str = "loaded") -> Iterator[Draw]:
    """To be called with (bytes so far, bytes in all), shows GB and GB/s; in a log file one line at the end."""
    started = loaded = 0.0

    def draw(done: int, total: int) -> None:
        nonlocal started, loaded
        # Planning and opening come before the first byte and are no part of the rate.
        started, loaded = started or time.perf_counter(), total
        bar(done, total)

    with progress_bar(console, done_what, progress.DownloadColumn(), progress.TransferSpeedColumn()) as bar:
        yield draw
    if loaded and not console.is_terminal:
        seconds = time.perf_counter() - started
        rate = loaded / seconds / 1e9
        console.print(f"{done_what} {loaded / 1e9:.2f} GB in {seconds:.2f} s, {rate:.2f} GB/s", highlight=False)
