"""Sidecars: a file per layer, of a complete model or of a rank's shard."""

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

from torch import Tensor

from offload_rt.errors import CheckpointError, LinkError
from offload_rt.offload.disk import DiskTier, ReadSettings
from offload_rt.offload.mirrors import NO_MIRRORS, DirectFiles, Mirrors
from offload_rt.offload.tier import Read, Tier, read_parallel
from offload_rt.ops import lossless
from offload_rt.weights.checkpoint import Checkpoint
from offload_rt.weights.layout import Layout, PackedLayer, host_block
from offload_rt.weights.lossless import (
    RECREATE,
    SidecarLayer,
    chunk_digest,
    encode_layer,
    layer_path,
    read_layer,
    write_layer,
)


class SidecarTier(Tier):
    """Tier of sidecar layers, decoded by the reader threads or left encoded for the GPU.

    Requests consist of whole chunks, each checked against its digest. Direct reads use a buffer per
    thread, so a slot contains the layer only.
    """

    def __init__(
        self,
        layers: Sequence[SidecarLayer],
        settings: ReadSettings,
        decodes: bool,
        mirrors: Mirrors = NO_MIRRORS,
    ) -> None:
        self.settings = settings
        self._layers = layers
        self._decodes = decodes
        self._files = DirectFiles((layer.payload for layer in layers), mirrors)
        self.n_parallel = settings.n_parallel * self._files.n_disks

    def layout(self, i: int) -> Layout:
        encoded = self._layers[i].encoded
        return encoded.layout if self._decodes else encoded.block_layout

    def nbytes(self, i: int) -> int:
        """Return the bytes read for block i."""
        return self._layers[i].encoded.payload_nbytes

    def reads(self, i: int, into: Tensor) -> list[Read]:
        encoded = self._layers[i].encoded
        bounds = [0]
        filled = 0
        for k, nbytes in enumerate(encoded.chunks["nbytes"].tolist()):
            if filled and filled + nbytes > self.settings.request_nbytes:
                bounds.append(k)
                filled = 0
            filled += nbytes
        bounds.append(len(encoded.chunks))
        if not self._decodes:
            encoded.write_table(into)
        return [partial(self._read, i, first, stop, into) for first, stop in pairwise(bounds)]

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def _read(self, i: int, first: int, stop: int, into: Tensor) -> int:
        layer = self._layers[i]
        target = into.numpy()
        chunks = layer.encoded.chunks[first:stop]
        path = layer.payload.path
        start = int(chunks[0]["source"])
        nbytes = int(chunks["nbytes"].sum())
        at = layer.payload.start + start - layer.encoded.table_nbytes
        content = self._files.bounced(path, at, nbytes).numpy()
        for chunk, digest in zip(chunks.tolist(), layer.digests[first:stop].tolist(), strict=True):
            source, offset, n, size, kind = chunk
            part = content[source - start : source - start + size]
            is_sound = chunk_digest(part, kind) == digest
            if is_sound and self._decodes:
                is_sound = lossless.decode(part, kind, n, target[offset:])
            if not is_sound:
                raise LinkError(f"{path} is damaged", change=RECREATE)
        if not self._decodes:
            target[start : start + nbytes] = content
        return nbytes


def open_sidecar(checkpoint: Checkpoint, directory: Path) -> tuple[SidecarLayer, ...]:
    """Open all layers of a sidecar, checked when read; raises CheckpointError."""
    checkpoint = replace(checkpoint, whole=None)  # the identity of a shard is its own
    return tuple(_open_layer(checkpoint, directory, i) for i in range(checkpoint.spec.n_layers))


def write_sidecar(
    checkpoint: Checkpoint,
    directory: Path,
    progress: Callable[[int, int], None],
    is_raw: bool = False,
) -> tuple[int, int]:
    """Write missing and damaged layers; return the bytes of all layers, raw and encoded.

    is_raw    without encoding, tensors in order of use
    progress  receives (bytes of layers so far, total bytes)
    Raises LinkError or CheckpointError if reading the checkpoint fails, OSError if writing fails.
    """
    directory.mkdir(parents=True, exist_ok=True)
    checkpoint = replace(checkpoint, whole=None)
    raw = encoded = 0
    with closing(DiskTier(checkpoint.layers, packed=True)) as files:
        sizes = [files.nbytes(i) for i in range(checkpoint.spec.n_layers)]
        for i, nbytes in enumerate(sizes):
            try:
                layer = _open_layer(checkpoint, directory, i)
                with closing(SidecarTier([layer], ReadSettings(), decodes=False)) as tier:
                    read_parallel(tier.reads(0, host_block(layer.encoded.nbytes)), tier.n_parallel)
            except (CheckpointError, LinkError):
                block = host_block(files.layout(i).nbytes)
                read_parallel(files.reads(i, block), files.n_parallel)
                stored = PackedLayer(block, files.layout(i))
                image = encode_layer(stored, os.cpu_count() or 1, is_raw)
                write_layer(layer_path(directory, i), checkpoint.identity, i, image)
                layer = _open_layer(checkpoint, directory, i)
            raw += nbytes
            encoded += layer.encoded.payload_nbytes
            progress(raw, sum(sizes))
    return raw, encoded


def _open_layer(checkpoint: Checkpoint, directory: Path, i: int) -> SidecarLayer:
    layout = checkpoint.layers[i].layout
    return read_layer(layer_path(directory, i), checkpoint.identity, i, layout)
