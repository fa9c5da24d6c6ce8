"""Files kept between runs: unwritable folders, full disks, damage and concurrent writers."""

import json
import os
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from support.command_line import Line
from support.spies import before_calls

from offload_rt.cli import calibrate
from offload_rt.errors import CacheError
from offload_rt.ops import lossless_kernels
from offload_rt.system import files, numba_cache

SOUND = {"version": 1, "entries": {"x": 1.5}}
DAMAGE = (
    b"", b'{"version": 1, "entr', bytes(range(256)), b"[" * 200_000, b"[]", b'"x"',
    b'{"version": 1, "entries": {"x": ' + b"9" * 5000 + b"}}", json.dumps(SOUND).encode(),
)  # fmt: skip
NAMES = ("disk.json", "passes.json", "pairs.json")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "offload_rt"


@pytest.fixture(scope="module")
def calibrated(model: Path, draft: Path) -> list[str]:
    flags = "--tree-size 8 --tree-depth 3 --max-model-len 128 --device cpu --device-memory 1600000"
    return [*flags.split(), "--model", str(model), "--draft-model", str(draft)]


@pytest.fixture(scope="module")
def drafted(calibrated: list[str]) -> list[str]:
    return [*calibrated, "--prompt", "the quick brown", "--max-new-tokens", "12", "--quiet"]


@pytest.fixture
def whole(drafted: list[str], line: Line, cache: Path) -> Iterator[tuple[int, str, str]]:
    """A run that has filled the cache."""
    ended = line(*drafted)
    assert ended[0] == 0 and {path.name for path in cache.iterdir()} == {*NAMES}
    yield ended


@pytest.mark.parametrize("place", ["/proc/nothing", "/dev/null", "\udcff"])
def test_unwritable_cache_folder_ends_no_run(place, drafted, line, whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where a name of any bytes may be a folder after all
    monkeypatch.setenv("XDG_CACHE_HOME", place)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        assert line(*drafted) == whole
    n_expected = 0 if Path(place).is_dir() else 1
    assert [warning.category for warning in shown] == [CacheError] * n_expected


@pytest.mark.parametrize("name", NAMES)
def test_unsaved_calibration_is_an_error(name, calibrated, line, cache, monkeypatch):
    """The statistics of the pair are saved last, after the printed results."""

    def fail(path: Path, _: str) -> None:
        if path.name == name:
            raise OSError(28, "No space left on device")

    before_calls(monkeypatch, files, "write_atomically", fail)
    more = ["--drafter", "static_tree", "--tokens", "2"]
    code, out, err = line(*calibrated, *more, main=calibrate.main)
    assert code == 3 and bool(out) == (name == "pairs.json")
    assert err.splitlines()[-1] == (
        f"error: cannot save measurements in {cache.parent} (No space left on device); make room"
        " there, or set XDG_CACHE_HOME to a writable folder"
    )


def test_full_disk_under_the_cache_ends_no_run(drafted, line, whole, cache, monkeypatch):
    before = {path.name: path.read_bytes() for path in cache.iterdir()}
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.warns(CacheError, match="No space left on device"):
        assert line(*drafted) == whole
    assert {path.name: path.read_bytes() for path in cache.iterdir()} == before


def test_missing_home_means_no_cache(monkeypatch):
    no_home = RuntimeError("Could not determine home directory.")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", Mock(side_effect=no_home))
    with pytest.warns(CacheError, match="home directory"):
        files.write_cached("disk.json", 1, {})
    assert files.read_cached("disk.json", 1) == {}


def test_damaged_cache_file_reads_as_empty(cache):
    """Also a file with other entries or of another version."""
    cache.mkdir()
    for damage in DAMAGE:
        (cache / "x.json").write_bytes(damage)
        assert files.read_cached("x.json", 1) == {}, damage[:50]
    files.write_cached("x.json", 1, SOUND["entries"])
    assert files.read_cached("x.json", 1) == SOUND["entries"]
    assert files.read_cached("x.json", 2) == {}
    content = (cache / "x.json").read_text()
    (cache / "x.json").write_text(content.replace("1.5", "1.6"))
    assert files.read_cached("x.json", 1) == {}


def test_concurrent_writers_never_expose_partial_files(cache):
    def write(n: int) -> bool:
        files.write_cached("x.json", 1, {str(n): "x" * 50_000})
        return len(files.read_cached("x.json", 1)) == 1

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(write, range(100)))
    assert os.listdir(cache) == ["x.json"]


def test_compiled_functions_are_cached_in_the_cache_folder_if_possible(cache, monkeypatch):
    monkeypatch.setattr(numba_cache.config, "CACHE_DIR", "")

    def triple(x: float) -> float:
        return 3 * x

    assert numba_cache.compiled()(triple)(2.0) == 6.0
    assert list((cache / "numba").rglob("*.nbi"))
    assert numba_cache.config.CACHE_DIR == "", "functions of other packages keep their place"
    njit = numba_cache.njit

    def without_folder(cache: bool = False, **options: Any) -> Callable[..., Any]:
        if cache:
            raise RuntimeError("cannot cache function 'double': no locator available")
        return njit(**options)

    monkeypatch.setattr(numba_cache, "njit", without_folder)
    assert numba_cache.compiled()(triple)(2.0) == 6.0


def test_functions_run_without_numba(monkeypatch):
    """For example if numpy is newer than numba admits."""
    words = np.random.default_rng(0).integers(1 << 16, size=500, dtype=np.uint16)
    expected = lossless_kernels.count_others(words, False)
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.warns(UserWarning, match="stay interpreted: import of numba"):
        plain = runpy.run_path(numba_cache.__file__)["compiled"]
    monkeypatch.setattr(numba_cache, "compiled", plain)
    count = runpy.run_path(lossless_kernels.__file__)["count_others"]
    assert not hasattr(count, "py_func")  # compiled functions have it
    assert np.array_equal(count(words, False), expected)
