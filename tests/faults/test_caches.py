"""What is kept between runs: full disks, folders that cannot be written, damage, and several runs at once."""

import errno
import json
import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from numba.core import caching

from faults.counting import Count
from faults.injected import Failure
from faults.process import Ended, Job, Zygote, judge
from offload_rt.engine import profile
from offload_rt.system import files
from offload_rt.system.numba_cache import compiled

Speaks = Callable[..., list[str]]
Folder = Callable[[], Path]
RunAll = Callable[[Sequence[Job]], list[Ended]]

CALLS = ("open", "fsync", "replace", "mkdir")
ERRORS = (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO, errno.EDQUOT)
DAMAGE = {
    "empty": b"", "cut": b'{"version": 1, "entr', "binary": bytes(range(256)), "deep": b"[" * 200_000,
    "deep entries": b'{"version": 1, "entries": {"x": ' + b"[" * 200_000, "list": b"[]", "null": b"null",
    "long number": b'{"version": 1, "entries": {"x": ' + b"9" * 5000 + b"}}",
    "other version": b'{"version": 99, "entries": {}}',
    "no entries": b'{"version": 1}', "entries of a list": b'{"version": 1, "entries": [1]}',
}  # fmt: skip
NAMES = ("disk.json", "passes.json", "pairs.json", "trees.json")
# What may stand in the place of an entry, or anywhere in it.
ODD = (
    None, True, 0, -1, 1, 10**300, 10**4000, 1e308, 5e-324, float("nan"), float("inf"), "", "x", [], [1], [1, 10**9],
    [float("inf"), 1], [1 << 20, 10**12], {}, {"seconds": 7}, [[[]]], {"acceptance": {"0": [[1], [2]]}},
)  # fmt: skip


@pytest.fixture(scope="session")
def written(zygote: Zygote, pair: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A cache folder after an undisturbed run with a draft, and that run's text."""
    folder = tmp_path_factory.mktemp("written")
    ended = zygote.start(Job(_drafted(pair), folder)).end()
    judge(ended, [0])
    assert {path.name for path in (folder / "cache" / "offload_rt").iterdir()} >= {"passes.json", "pairs.json"}
    return folder / "cache" / "offload_rt", ended.out


def _drafted(pair: list[str]) -> list[str]:
    return [*pair, "--prompt", "the quick brown", "--max-new-tokens", "12", "--quiet", "--device-memory", "1600000"]


def test_a_cache_that_cannot_be_written_is_no_reason_to_end(
    pair: list[str], written: tuple[Path, str], folder: Folder, run_all: RunAll, faults: Count
) -> None:
    failures = [Failure(call, error, n % 2) for call in CALLS for n, error in enumerate(ERRORS)]
    jobs = [Job(_drafted(pair), folder(), failures=[failure]) for failure in failures]
    for ended in run_all(jobs):
        with faults.one():
            judge(ended, [0], text=written[1])


@pytest.mark.parametrize("limit", [0, 10, 100, 1000])
def test_files_that_may_not_grow(
    limit: int, pair: list[str], written: tuple[Path, str], folder: Folder, zygote: Zygote, faults: Count
) -> None:
    with faults.one():
        read, write = os.pipe()  # the text itself goes through no file
        ended = zygote.start(Job(_drafted(pair), folder(), limits={"FSIZE": limit}, stdout=write)).end()
        os.close(write)
        with os.fdopen(read) as said:
            assert said.read() == written[1]
        judge(ended, [0])


@pytest.mark.parametrize("place", ["/proc/nothing", "/dev/null", "stdin", "\udcff"])
def test_a_cache_folder_that_cannot_be(
    place: str, pair: list[str], written: tuple[Path, str], folder: Folder, zygote: Zygote, faults: Count
) -> None:
    with faults.one():
        judge(zygote.start(Job(_drafted(pair), folder(), cache=Path(place))).end(), [0], text=written[1])


def test_a_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: Count) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with faults.one():
        files.write_cached("disk.json", 1, {})
        assert files.read_cached("disk.json", 1) == {}


def test_damaged_caches_are_rebuilt(
    pair: list[str], written: tuple[Path, str], folder: Folder, run_all: RunAll, faults: Count
) -> None:
    jobs = []
    for damage in DAMAGE.values():
        path = folder()
        (path / "cache" / "offload_rt").mkdir(parents=True)
        for name in NAMES:
            (path / "cache" / "offload_rt" / name).write_bytes(damage)
        jobs.append(Job(_drafted(pair), path))
    for ended in run_all(jobs):
        with faults.one():
            left = [path.read_bytes() for path in (ended.job.cache_home / "offload_rt").glob("*.json")]
            for path in (ended.job.cache_home / "offload_rt").glob("*.json"):
                if path.read_bytes() in DAMAGE.values():
                    path.unlink()  # a file of something that this run did not need
            assert len(left) == 4
            judge(ended, [0], text=written[1])
            assert len(list((ended.job.cache_home / "offload_rt").glob("p*.json"))) == 2


def _spoilt(value: Any, chance: random.Random) -> Any:
    """A JSON value with something odd somewhere in it."""
    if chance.random() < 0.3 or not isinstance(value, dict | list) or not value:
        return chance.choice(ODD)
    if isinstance(value, dict):
        key = chance.choice(sorted(value))
        return {**value, key: _spoilt(value[key], chance)}
    i = chance.randrange(len(value))
    return [*value[:i], _spoilt(value[i], chance), *value[i + 1 :]]


def test_entries_that_are_odd_are_measured_again(
    pair: list[str], written: tuple[Path, str], folder: Folder, run_all: RunAll, faults: Count
) -> None:
    jobs = []
    for seed in range(24):
        chance, path = random.Random(seed), folder()
        (path / "cache" / "offload_rt").mkdir(parents=True)
        for name in NAMES:
            if (written[0] / name).exists():
                content = json.loads((written[0] / name).read_text())
                content["entries"] = {key: _spoilt(entry, chance) for key, entry in content["entries"].items()}
                (path / "cache" / "offload_rt" / name).write_text(json.dumps(content))
        jobs.append(Job(_drafted(pair), path))
    for ended in run_all(jobs):
        with faults.one():
            judge(ended, [0], text=written[1])


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: repr(odd)[:20])
def test_an_odd_entry_restores_nothing(odd: Any, faults: Count) -> None:
    entries = [{"widths": [1, 2], "contexts": [3, 4], "seconds": seconds} for seconds in (odd, [[1, odd], [1, 1]])]
    with faults.one():
        for entry in (odd, *entries):
            found = profile._restore(entry, (1, 2), (3, 4))
            assert found is None or (odd == 1 and entry is entries[1])


def test_six_runs_share_a_cache(
    pair: list[str], written: tuple[Path, str], folder: Folder, zygote: Zygote, tmp_path: Path, faults: Count
) -> None:
    cache = tmp_path / "shared"
    with ThreadPoolExecutor(6) as pool:
        jobs = [Job(_drafted(pair), folder(), cache=cache) for _ in range(6)]
        for ended in pool.map(lambda job: zygote.start(job).end(), jobs):
            with faults.one():
                judge(ended, [0], text=written[1])


def _doubled() -> Callable[[float], float]:
    @compiled()
    def double(x: float) -> float:
        return 2 * x

    return double


@pytest.mark.parametrize("damage", [None, b"", b"garbage", b"\x80\x04cos\nabort\n."])
def test_compiled_functions_need_no_cache(
    damage: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: Count
) -> None:
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    with faults.one():
        if damage is None:
            monkeypatch.setattr(os, "replace", lambda *names: (_ for _ in ()).throw(OSError(28, "No space left")))
        assert _doubled()(2.0) == 4.0
        for path in tmp_path.rglob("*.nb*"):
            path.write_bytes(damage or b"")
        assert _doubled()(2.0) == 4.0


def test_compiled_functions_need_no_folder(monkeypatch: pytest.MonkeyPatch, faults: Count) -> None:
    impl = getattr(caching, "CacheImpl", None) or caching._CacheImpl  # renamed between versions
    monkeypatch.setattr(impl, "_locator_classes", [])
    with faults.one():
        assert _doubled()(2.0) == 4.0


def test_writers_of_one_file_never_show_half_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: Count
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def write(n: int) -> bool:
        files.write_cached("x.json", 1, {str(n): "x" * 50_000})
        return len(files.read_cached("x.json", 1)) == 1

    with faults.one(), ThreadPoolExecutor(8) as pool:
        assert all(pool.map(write, range(100)))
        assert os.listdir(tmp_path / "offload_rt") == ["x.json"]
