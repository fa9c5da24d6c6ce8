"""Progress bars, shown only in a terminal."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import progress
from rich.console import Console
from rich.table import Column
from rich.text import Text

_SECONDS_BETWEEN_DRAWS = 0.1
# Columns of the terminal for title and figures, and the maximum of the bar.
_BESIDE_BAR = 50
_LONGEST_BAR = 40


class _Title(progress.ProgressColumn):
    def render(self, task: progress.Task) -> Text:
        return Text(task.description, no_wrap=True, overflow="ellipsis")


@contextmanager
def progress_bar(
    console: Console,
    title: str,
    *figures: type[progress.ProgressColumn],
    is_transient: bool = False,
) -> Iterator[Callable[..., None]]:
    """Show a bar in one line; yield the function that shows (done, total, new title or None)."""
    drawn = 0.0

    def draw(done: int, total: int, title: str | None = None) -> None:
        nonlocal drawn
        now = time.perf_counter()
        if done >= total or now - drawn > _SECONDS_BETWEEN_DRAWS:
            drawn = now
            bar.update(task, completed=done, total=total, description=title, refresh=True)

    # Drawn by the caller: an interrupt can break the wait for a separate drawing thread.
    length = min(console.width - _BESIDE_BAR, _LONGEST_BAR)
    kinds: list[type[progress.ProgressColumn]] = [*figures, progress.TimeElapsedColumn]
    with progress.Progress(
        _Title(),
        *([progress.BarColumn(length)] if length > 0 else []),
        *(kind(table_column=Column(no_wrap=True)) for kind in kinds),
        console=console,
        disable=not console.is_terminal,
        auto_refresh=False,
        transient=is_transient,
    ) as bar:
        task = bar.add_task(title, total=None)
        yield draw


@contextmanager
def loading_bar(
    console: Console, verb: str = "loaded", next_phase: str | None = "measuring passes"
) -> Iterator[Callable[..., None]]:
    """Show GB and GB/s; yield the function to update them. `next_phase` titles the time after."""
    started = ended = loaded = 0.0

    def draw(done: int, total: int, title: str | None = None) -> None:
        nonlocal started, ended, loaded
        # Planning and opening precede the first byte and do not count for the rate.
        ended = time.perf_counter()
        started = started or ended
        loaded = total
        bar(done, total, next_phase if done >= total else title)

    figures = progress.DownloadColumn, progress.TransferSpeedColumn
    with progress_bar(console, verb, *figures) as bar:
        yield draw
        if loaded:
            bar(int(loaded), int(loaded), verb)
    if loaded and not console.is_terminal:
        seconds = ended - started
        rate = f", {loaded / seconds / 1e9:.2f} GB/s" if seconds else ""
        console.print(f"{verb} {loaded / 1e9:.3g} GB in {seconds:.2f} s{rate}", highlight=False)
