"""Pictures of a plan, of a calibration and of a timeline, drawn by matplotlib where it is
installed.
"""

import io
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload_rt.config import check_folder
from offload_rt.errors import SettingsError
from offload_rt.system.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def is_drawable() -> bool:
    """Whether pictures can be drawn."""
    return find_spec("matplotlib") is not None


def check_picture(flag: str, path: str | Path) -> None:
    """Raises SettingsError where no picture can be drawn, or where its folder does not exist."""
    if not is_drawable():
        raise SettingsError(flag, need="matplotlib", have="none", change="pip install matplotlib")
    check_folder(flag, path)


def panels(n_rows: int, n_columns: int, size: tuple[float, float]) -> "tuple[Figure, Any]":
    """A figure of so many inches, and its (n_rows, n_columns) array of axes, which numpy cannot
    type.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(n_rows, n_columns, figsize=size, layout="constrained", squeeze=False)


def save(figure: "Figure", path: str | Path, dpi: int = 120) -> None:
    """Write a figure as PNG, whole or not at all, and close it. Raises OSError."""
    from matplotlib import pyplot

    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=dpi)
    pyplot.close(figure)
    write_atomically(Path(path), picture.getvalue())
