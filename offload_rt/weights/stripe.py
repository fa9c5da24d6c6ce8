"""Divide a checkpoint between the disk that holds it and further disks, without a second copy."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from offload_rt.errors import CheckpointError, SettingsError
from offload_rt.weights.files import INDEX, check_room, companions, tensors_of
from offload_rt.weights.header import TensorRecord, header_of

_LAYER = re.compile(r"\.(\d+)\.")

Progress = Callable[[int, int], None]


def stripe(
    source: Path, folders: Sequence[Path], gbps: Sequence[float], progress: Progress
) -> list[int]:
    """Copy a part of each layer to each folder; return the bytes per disk, the source's first.

    The first folder becomes a checkpoint. Its index names the new files and, through links, the
    files of the source, which must stay.
    gbps      read rates of the disks, the source's first
    progress  receives (copied bytes, bytes to copy)
    Raises CapacityError if a folder has too little room, CheckpointError for a damaged source,
    OSError if writing fails.
    """
    shares = divide(tensors_of(source).values(), gbps)
    sizes = [sum(record.nbytes for record in share) for share in shares]
    for folder in folders:
        if folder.resolve() == source.resolve():
            raise SettingsError(f"--stripe {folder} is the checkpoint", change="name a new folder")
        folder.mkdir(parents=True, exist_ok=True)
    for folder, nbytes in zip(folders, sizes[1:], strict=True):
        check_room(folder, nbytes)
    top = folders[0]
    files = {record.name: record.path.name for record in shares[0]}
    for path in {record.path for record in shares[0]}:
        _link(top / path.name, path)
    done = 0
    for i, (folder, share) in enumerate(zip(folders, shares[1:], strict=True), 2):
        name = f"disk-{i}-of-{len(shares)}.safetensors"
        for nbytes in _write(folder / name, share):
            done += nbytes
            progress(done, sum(sizes[1:]))
        if folder != top:
            _link(top / name, folder / name)
        files |= dict.fromkeys((record.name for record in share), name)
    for path in companions(source):
        shutil.copyfile(path, top / path.name)
    (top / INDEX).write_text(json.dumps({"weight_map": files}), encoding="utf-8")
    return sizes


def divide(records: Iterable[TensorRecord], gbps: Sequence[float]) -> list[list[TensorRecord]]:
    """Assign tensors to disks so that all disks read their part of each layer in equal time."""
    ordered = sorted(records, key=lambda record: (_layer(record), -record.nbytes, record.name))
    shares: list[list[TensorRecord]] = [[] for _ in gbps]
    loads = [0.0] * len(gbps)
    for record in ordered:
        ends = [load + record.nbytes / rate for load, rate in zip(loads, gbps, strict=True)]
        disk = ends.index(min(ends))
        loads[disk] = ends[disk]
        shares[disk].append(record)
    if not all(shares):
        problem = "the checkpoint has fewer tensors than --stripe has disks"
        raise CheckpointError(problem, change="name fewer folders")
    return shares


def _layer(record: TensorRecord) -> int:
    match = _LAYER.search(record.name)
    return int(match[1]) if match else -1


def _link(link: Path, target: Path) -> None:
    link.unlink(missing_ok=True)
    link.symlink_to(target.resolve())


def _write(path: Path, records: Sequence[TensorRecord]) -> Iterable[int]:
    """Write tensors to a safetensors file, or leave no file; yield the bytes of each piece."""
    unfinished = path.with_suffix(".tmp")
    try:
        with unfinished.open("wb") as file:
            file.write(header_of(records))
            file.flush()
            for record in records:
                with record.path.open("rb") as source:
                    at = record.start
                    while at < record.stop:
                        n = os.sendfile(file.fileno(), source.fileno(), at, record.stop - at)
                        if n == 0:
                            problem = f"{record.path} ends at byte {at}"
                            raise CheckpointError(problem, change="download it again")
                        at += n
                        yield n
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
