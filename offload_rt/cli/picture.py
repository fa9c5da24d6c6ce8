"""Figures of a calibration, drawn by matplotlib."""

import io
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload_rt.config import check_folder
from offload_rt.errors import SettingsError
from offload_rt.system.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_picture(flag: str, path: str | Path) -> None:
    """Raise SettingsError if matplotlib or the folder of the file is missing."""
    if find_spec("matplotlib") is None:
        raise SettingsError(flag, need="matplotlib", have="none", change="pip install matplotlib")
    check_folder(flag, path)


def panels(n_rows: int, n_columns: int, size: tuple[float, float]) -> "tuple[Figure, Any]":
    """Create a figure of this size in inches and its (n_rows, n_columns) array of axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(n_rows, n_columns, figsize=size, layout="constrained", squeeze=False)


def save(figure: "Figure", path: str | Path, dpi: int = 120) -> None:
    """Write a figure atomically as PNG and close it. Raises OSError."""
    from matplotlib import pyplot

    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=dpi)
    pyplot.close(figure)
    write_atomically(Path(path), picture.getvalue())
