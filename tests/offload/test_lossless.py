"""Lossless weights: every bit is restored, sidecars are whole or refused, tokens are equal."""

import ctypes
import json
import mmap
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import safetensors.numpy
import torch
from support import emulated
from support.checkpoints import pack, raw_bytes
from support.fake_gpu import fake_gpu
from support.spies import before_calls
from support.spoiling import spoil_bytes
from support.tiny import CASES, generate, open_unloaded, prompt_of
from torch import Tensor

from offload_rt import LLM, SamplingParams
from offload_rt.cli import convert
from offload_rt.engine import link_rates, profile
from offload_rt.engine.engine_spec import EngineSpec
from offload_rt.engine.link_rates import LinkRates
from offload_rt.errors import CapacityError, CheckpointError, OffloadError, SettingsError
from offload_rt.offload import sidecar as sidecars
from offload_rt.offload.disk import ReadSettings
from offload_rt.offload.sidecar import SidecarTier, open_sidecar, write_sidecar
from offload_rt.offload.tier import read_parallel
from offload_rt.ops import cpu, extension, lossless
from offload_rt.ops.lossless import BFLOAT16, FLOAT, HALF, KIND_OF, RAW
from offload_rt.weights.checkpoint import open_checkpoint
from offload_rt.weights.layout import PAGE, host_block
from offload_rt.weights.lossless import (
    Coding,
    EncodedImage,
    EncodedLayer,
    encode_layer,
    estimate,
    layer_path,
    read_layer,
)

Decoder = Callable[[EncodedImage, Tensor], bool]
# 64 and 4,096 weights start on their own, and a chunk ends after 524,288.
COUNTS = (1, 7, 63, 64, 65, 4095, 4096, 4097, 20_000)


@pytest.fixture(
    params=("avx512", "portable", "numpy", "kernel", pytest.param("card", marks=pytest.mark.cuda))
)
def decoder(request: pytest.FixtureRequest) -> Decoder:
    """Return a function that decodes a block into another and returns whether it was valid."""
    name = request.param
    if name == "kernel":
        ops = getattr(torch.ops, emulated.load())
        return lambda image, out: (
            ops.lossless_decode(image.block, len(image.encoded.chunks), out) is None
        )
    if name == "card" and extension.missing():
        pytest.skip("no card, or the kernels are not built for one")
    if name in ("avx512", "portable") and cpu.library() is None:
        pytest.skip("there was no g++ when offload_rt was built")

    def on_card(image: EncodedImage, out: Tensor) -> bool:
        there = out.cuda()
        lossless.decode_block(image.block.cuda(), len(image.encoded.chunks), there)
        out.copy_(there)
        return True

    def by_library(chunk: np.ndarray, kind: int, n: int, to: np.ndarray) -> bool:
        places = chunk.ctypes.data, len(chunk), kind, n, to.ctypes.data
        return cpu.library().offload_rt_decode(*places, name == "portable")

    def on_cpu(image: EncodedImage, out: Tensor) -> bool:
        is_sound = True
        encoded = lossless.decode_by_numpy if name == "numpy" else by_library
        for source, target, n, nbytes, kind in image.encoded.chunks.tolist():
            decode = lossless.decode if kind == RAW else encoded
            chunk = image.block.numpy()[source : source + nbytes]
            is_sound &= decode(chunk, kind, n, out.numpy()[target:])
        return is_sound

    return on_card if name == "card" else on_cpu


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Weights as training leaves them: every row has a scale of its own."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.exp(0.3 * torch.randn(shape[0], *(1,) * (len(shape) - 1), generator=generator))
    return (0.02 * rows * torch.randn(shape, generator=generator)).bfloat16()


def patterns(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """All 65,536: subnormal numbers, infinities, every payload of NaN, both zeros."""
    return torch.arange(65_536, dtype=torch.int32).to(torch.uint16).view(dtype)


def decoded(image: EncodedImage, decode: Decoder) -> dict[str, Tensor]:
    with guarded(image) as out:
        assert decode(image, out)
    return image.encoded.layout.views(out)


@contextmanager
def guarded(image: EncodedImage) -> Iterator[Tensor]:
    """Memory for a decoded layer, with an end that nobody may write."""
    out = host_block(image.encoded.layout.nbytes + 64).fill_(0xA5)
    yield out
    assert (out[image.encoded.layout.nbytes :] == 0xA5).all(), "written past the end"


def is_same(mine: dict[str, Tensor], tensors: dict[str, Tensor]) -> bool:
    return all(raw_bytes(mine[name]) == raw_bytes(tensor) for name, tensor in tensors.items())


def kinds_of(image: EncodedImage) -> dict[str, int]:
    names = (entry.name for entry in image.encoded.layout.entries)
    return {name: coding.kind for name, coding in zip(names, image.encoded.codings, strict=True)}


LAYER = {
    "long": normal(700, 800),  # more than a chunk
    "patterns": torch.cat((patterns(), normal(60, 12_000).view(-1), patterns().flip(0))),
    "half": torch.cat((normal(60_000).half(), patterns(torch.float16)[::16])),
    "single": torch.cat((normal(200_001), patterns()[::32])).float(),
    "norm": 1 + normal(2, 33),
    "real half": torch.randn(3000, generator=torch.Generator().manual_seed(1)).half(),
    "real single": torch.randn(3000, generator=torch.Generator().manual_seed(2)),
    "integers": torch.arange(999, dtype=torch.int32),
    "long bytes": torch.arange(1_200_003, dtype=torch.int32).to(torch.uint8),
    "one": normal(1),
}


def test_every_bit_of_a_layer_is_restored(decoder):
    image = encode_layer(pack(LAYER), 2)
    kinds = {"long": BFLOAT16, "patterns": BFLOAT16, "half": HALF, "single": FLOAT}
    raw = dict.fromkeys(("real half", "real single", "integers", "long bytes", "one"), RAW)
    assert (kinds | raw).items() <= kinds_of(image).items()
    assert is_same(decoded(image, decoder), LAYER)


@pytest.mark.parametrize("dtype", KIND_OF)
def test_every_pattern_is_restored_with_any_table(decoder, dtype):
    """Lengths that fill the last group partially; repeated words form the table."""
    kind = KIND_OF[dtype]
    words = patterns(torch.uint16).numpy()
    for seed, n in enumerate((65_536, 65_536, 65_536, *COUNTS)):
        part = np.roll(words, 7 * n)[:n].copy() if seed else words
        if seed:
            repeated = np.random.default_rng(seed).choice(words, 9)
            part[n // 2 :] = repeated[np.arange(n - n // 2) % 9]
        bits = torch.from_numpy(part.astype(np.uint32) << 16 if kind == FLOAT else part.copy())
        x = bits.view(dtype.torch)
        n_escapes = lossless.n_escapes(part, kind)
        nbytes = lossless.chunk_nbytes(n, n_escapes)
        encoded = EncodedLayer.from_codings(pack({"x": x}).layout, [Coding(kind, (nbytes,))])
        block = host_block(encoded.nbytes)
        encoded.write_table(block)
        lossless.encode(part, kind, block.numpy()[encoded.table_nbytes :][:nbytes])
        image = EncodedImage(block, encoded.block_layout, encoded)
        assert is_same(decoded(image, decoder), {"x": x})


@pytest.mark.slow
def test_digests_of_numpy_and_c_are_equal_and_detect_every_bit():
    draw = np.random.default_rng(0)
    for n in (0, 1, 8, 255, 256, 257, 5000):
        content = draw.integers(0, 256, n, np.uint8)
        digest = lossless.digest_by_numpy(content)
        assert lossless.digest(content) == digest
        for bit in range(0, 8 * n, 1 + n // 10):
            content[bit // 8] ^= 1 << bit % 8
            assert lossless.digest_by_numpy(content) != digest
            content[bit // 8] ^= 1 << bit % 8
        # Two bits at a distance at which their words share a lane.
        if n >= 512:
            content[[3, 259]] ^= 0x80
            assert lossless.digest_by_numpy(content) != digest
    assert lossless.digest(np.zeros(256, np.uint8)) != lossless.digest(np.zeros(512, np.uint8))


def before_a_wall(nbytes: int) -> np.ndarray:
    """Return (nbytes,) uint8 zeros in front of a protected page."""
    size = -(-nbytes // PAGE) * PAGE
    pages = mmap.mmap(-1, size + PAGE)
    content = np.frombuffer(pages, np.uint8)
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(content.ctypes.data + size), PAGE, 0) == 0
    return content[size - nbytes : size]


def test_hostile_chunk_stays_within_its_bounds(decoder, request):
    """Contradictory starts, their end and planes are detected, except by the kernel."""
    draw = np.random.default_rng(0)
    images = (encode_layer(pack({"x": normal(n)}), 1) for n in range(5000, 5100))
    # then a block before the wall is aligned
    image = next(image for image in images if image.encoded.payload_nbytes % 16 == 0)
    block = before_a_wall(image.encoded.table_nbytes + image.encoded.payload_nbytes)
    whole = slice(None)
    for part, content in (
        (whole, draw.integers(0, 256, image.encoded.payload_nbytes)), (whole, 255), (whole, 0),
        (slice(8, 20), 255), (slice(12, 13), 0), (slice(16, 17), 0), (slice(-24, None), 0),
    ):  # fmt: skip
        block[:] = image.block.numpy()[: len(block)]
        block[image.encoded.table_nbytes :][part] = content
        with guarded(image) as out:
            is_sound = decoder(replace(image, block=torch.from_numpy(block)), out)
        assert not is_sound or request.node.callspec.params["decoder"] in ("kernel", "card")


def test_lossless_op_refuses_wrong_arguments():
    image = encode_layer(pack({"x": normal(5000)}), 1)
    out = torch.zeros(image.encoded.layout.nbytes, dtype=torch.uint8)
    n = len(image.encoded.chunks)
    op = getattr(torch.ops, emulated.load()).lossless_decode
    torch.library.opcheck(op.default, (image.block, n, out), test_utils="test_schema")
    with pytest.raises(RuntimeError, match="chunks"):
        op(image.block, 10_000, out)
    with pytest.raises(RuntimeError, match="multiples of 16"):
        op(image.block[1:], n, out)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lossless") / "model"
    CASES["mistral"].build(0, torch.bfloat16).save_pretrained(path, max_shard_size="200KB")
    return path


@pytest.fixture(scope="module")
def converted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sidecar")
    write_sidecar(open_checkpoint(model), directory, lambda done, total: None)
    return directory


def blocks_of(layers: list[EncodedLayer]) -> list[Tensor]:
    with closing(SidecarTier(layers, ReadSettings(8192), decodes=True)) as tier:
        blocks = [host_block(tier.layout(i).nbytes) for i in range(len(layers))]
        for i, block in enumerate(blocks):
            read_parallel(tier.reads(i, block), 2)
    return blocks


def test_convert_resumes_and_repairs(model, converted, tmp_path, monkeypatch, capfd):
    arguments = ["--model", str(model), "--sidecar", str(tmp_path)]
    written = []

    def interrupt(path: Path, *_: object) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path.name)

    with monkeypatch.context() as patch:
        before_calls(patch, sidecars, "write_layer", interrupt)
        assert convert.main(arguments) == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == written  # and no temporary file
    with pytest.raises(CheckpointError, match="not there"):
        open_sidecar(open_checkpoint(model), tmp_path)
    content = bytearray(layer_path(tmp_path, 1).read_bytes())
    content[len(content) // 3] ^= 4
    layer_path(tmp_path, 1).write_bytes(content)
    before = layer_path(tmp_path, 0).stat().st_mtime_ns
    assert convert.main(arguments) == 0
    assert layer_path(tmp_path, 0).stat().st_mtime_ns == before
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (converted / path.name).read_bytes()
    out, err = capfd.readouterr()
    assert "%" in out and "encoded" in err and "loaded" not in err


def with_lies(content: bytes, chance: random.Random) -> bytes:
    """Change one number, the label, or the shape of the index of a file."""
    header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
    metadata = header["__metadata__"]
    tensors = safetensors.numpy.load(content)
    index = tensors["index"].copy()
    row, column = chance.randrange(len(index)), chance.randrange(3)
    match chance.randrange(4):
        case 0 | 1:
            number = index[row, column]
            odd = (0, 1, 3, 8, 255, 1 << 31, 1 << 63, (1 << 64) - 1, number ^ 24, number ^ 8)
            index[row, column] = chance.choice(odd)
        case 2:
            metadata[chance.choice(list(metadata))] = chance.choice(("", "1", "x"))
        case 3:
            changed = (index[:row], np.repeat(index, 2, 0), index[:, :column], index.view(np.int64))
            index = np.ascontiguousarray(chance.choice(changed))
    return safetensors.numpy.save(tensors | {"index": index}, metadata)


def test_hostile_sidecars_are_refused_or_exact(model, converted, tmp_path):
    checkpoint = open_checkpoint(model)
    identity, records = checkpoint.identity, checkpoint.layers[2]
    sound = open_sidecar(checkpoint, converted)[2]
    whole = layer_path(converted, 2).read_bytes()
    for name, i in ((identity, 1), (identity[1:], 2)):
        with pytest.raises(CheckpointError, match=f"not layer {i} of this checkpoint"):
            read_layer(layer_path(converted, 2), name, i, sound.encoded.layout)
    path = layer_path(tmp_path, 2)
    n_refused = 0
    (wanted,) = blocks_of([sound])
    views = sound.encoded.layout.views(wanted)
    assert all(raw_bytes(views[record.key]) == record.read(0, record.nbytes) for record in records)
    assert sound.encoded.nbytes <= estimate(records)
    for seed in range(400):
        chance = random.Random(seed)
        n = len(whole) if chance.random() < 0.7 else 8 + struct.unpack("<Q", whole[:8])[0]
        spoilt = spoil_bytes(whole[:n], chance) + whole[n:]
        path.write_bytes(spoilt if seed % 4 else with_lies(whole, chance))
        try:
            (block,) = blocks_of([read_layer(path, identity, 2, sound.encoded.layout)])
        except OffloadError as error:
            n_refused += 1
            assert "\n" not in str(error)
        else:
            assert torch.equal(block, wanted), seed
    assert n_refused > 350


def spec_of(model: Path, **settings: object) -> EngineSpec:
    settings = {"device": "cpu", "max_model_len": 64, "drafter": "none"} | settings
    with open_unloaded(model, **settings) as unloaded:
        return unloaded.spec


def run(model: Path, **settings: object) -> tuple[list[int], int]:
    """Greedy tokens, and the bytes that crossed the link, in float32."""
    with LLM(str(model), max_model_len=64, drafter="none", dtype="float32", **settings) as llm:
        output = llm.generate(prompt_of(0), SamplingParams(max_new_tokens=5))[0]
    return output.token_ids, output.stats.link_bytes


@pytest.fixture(autouse=True)
def _slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates favour a sidecar on any machine; buffers cannot hold the whole test model."""
    monkeypatch.setattr("offload_rt.engine.link._BUFFERS", 8192)
    measure(monkeypatch, LinkRates(link_gbps=1.0, decode_gbps=100.0))


def measure(monkeypatch: pytest.MonkeyPatch, rates: LinkRates) -> None:
    monkeypatch.setattr("offload_rt.engine.link.measured_rates", lambda *_: rates)


def budget(model: Path, **settings: object) -> int:
    """Return the smallest budget: two slots and the decoding buffer."""
    plan = spec_of(model, dtype="float32", **settings).plan
    return plan.reserved.total + 2 * plan.slot_nbytes + plan.link.buffer


def test_lossless_tokens_equal_raw_with_fewer_bytes(model, converted):
    places = {"device": "cpu", "sidecar": str(converted)}, {"device": "cpu", "link_format": "raw"}
    encoded, raw = (run(model, **how, device_memory=budget(model, **how)) for how in places)
    exact = CASES["mistral"].build(0, torch.bfloat16).float()
    assert encoded[0] == raw[0] == generate(exact, prompt_of(0), 5)
    assert encoded[1] < 0.78 * raw[1]  # chunks this small are padded


def test_damaged_sidecar_is_reported_and_ignored(model, converted, tmp_path):
    copied = shutil.copytree(model, tmp_path / "m")
    shutil.copytree(converted, copied / "lossless")
    spec = spec_of(copied)
    assert spec.target.link.sidecar and "read encoded" in spec.notice
    layer_path(copied / "lossless", 3).write_bytes(b"x" * 100)
    spec = spec_of(copied)
    assert spec.target.link.sidecar is None and "layer-00003" in spec.notice
    for path, words in ((copied, "layer-00003"), (model, "offload-rt convert")):
        with pytest.raises(CheckpointError, match=words):
            spec_of(path, link_format="lossless")


@pytest.mark.parametrize(("rates", "is_encoded", "figures"), [
    (LinkRates(0.5, 5.0), True, "0.50 GB/s and 0.20 s to decode; raw weights need 2.00 s"),
    (LinkRates(2.0, 2.0), False, "2.00 GB/s and 0.50 s to decode; raw weights need 0.50 s"),
    (LinkRates(1.0, 3.0), False, "1.00 GB/s and 0.33 s to decode; raw weights need 1.00 s"),
])  # fmt: skip
def test_auto_uses_a_sidecar_if_measured_faster(
    rates, is_encoded, figures, model, converted, monkeypatch
):
    measure(monkeypatch, rates)
    spec = spec_of(model, sidecar=str(converted))
    assert bool(spec.target.link.sidecar) == is_encoded
    assert isinstance(spec.files.disk, SidecarTier) == is_encoded
    how = "read encoded" if is_encoded else "read raw, not from the sidecar"
    (line,) = spec.notice.splitlines()
    assert how in line and figures in line
    spec = spec_of(model, link_format="lossless", sidecar=str(converted))
    assert spec.target.link.sidecar and not spec.notice


def test_auto_uses_raw_weights_if_decoding_exceeds_memory(model, converted, monkeypatch):
    """On a CPU the read buffers add to the budget."""
    monkeypatch.setattr("offload_rt.engine.link._BUFFERS", 1 << 16)
    raw = budget(model, link_format="raw", device="cpu")
    place = {"device_memory": raw, "dtype": "float32", "sidecar": str(converted)}
    assert raw < budget(model, link_format="lossless", device="cpu", sidecar=str(converted))
    spec = spec_of(model, **place)
    assert spec.target.link.sidecar is None and spec.plan.streamed_nbytes
    assert "not from the sidecar: the device memory budget is too small" in spec.notice
    for more in ({"link_format": "lossless"}, {"device_memory": raw - 1}):
        with pytest.raises(CapacityError):
            spec_of(model, **place | more)


def test_rates_are_measured_once_and_after_cache_damage(model, converted, monkeypatch, tmp_path):
    """The decoder's rate is that of decoded bytes, of chunks that were all sound."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    checkpoint = open_checkpoint(model)
    layers = open_sidecar(checkpoint, converted)
    timed = Mock(side_effect=lambda device, work: [2e-6, 1e-6, 4e-6] if all(work()) else [])
    gbps = Mock(return_value=3.0)
    monkeypatch.setattr(lossless, "decode", decode := Mock(wraps=lossless.decode))
    monkeypatch.setattr(profile, "timed", timed)
    monkeypatch.setattr(profile, "link_gbps", gbps)
    expected = LinkRates(3.0, layers[0].encoded.layout.nbytes / 2e-6 / 1e9)
    path = tmp_path / "offload_rt" / "link.json"
    for n in (1, 2):
        for _ in range(2):
            rates = link_rates.measured_rates(checkpoint, layers, torch.device("cpu"))
            assert rates == expected and timed.call_count == gbps.call_count == n
        assert decode.call_count == n * len(layers[0].encoded.chunks)
        path.write_text(path.read_text().replace("3.0", "4.0"))


def test_cuda_rates_use_the_device_link_and_kernel(model, converted, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    layers = open_sidecar(open_checkpoint(model), converted)
    monkeypatch.setattr(lossless, "decode_block", decode := Mock(wraps=lossless.decode_block))
    monkeypatch.setattr(profile, "timed", lambda device, work: (work() and []) or [1e-6])
    monkeypatch.setattr(profile, "upload_gbps", lambda device: 25.0)
    with fake_gpu(monkeypatch, has_kernels=True):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
        rates = link_rates.measured_rates(open_checkpoint(model), layers, torch.device("cuda", 0))
    layout = layers[0].encoded.layout
    assert rates == LinkRates(25.0, layout.nbytes / 1e-6 / 1e9)
    entries = json.loads((tmp_path / "offload_rt" / "link.json").read_text())["entries"]
    assert set(entries) == {"link a card", "decoder a card"}
    decoded = layout.views(decode.call_args.args[2].cpu())
    assert is_same(decoded, layout.views(blocks_of(layers[:1])[0]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "where"), [("sidecar", "disk"), ("sidecar", "unpinned"), ("at load", "host")]
)
def test_cuda_decodes_lossless_layers(model, converted, monkeypatch, way, where):
    """From pinned memory, through pinned slots, and where the driver pins nothing."""
    place = {"device": "cuda", "link_format": "raw"}
    with fake_gpu(monkeypatch, has_kernels=True):
        raw = run(model, **place, device_memory=budget(model, device="cuda"))
    place |= {"link_format": "lossless"} | ({"sidecar": str(converted)} if way == "sidecar" else {})
    with fake_gpu(monkeypatch, has_kernels=True, pins=where != "unpinned"):
        place["device_memory"] = budget(model, **place)
        if where == "disk":
            plan = spec_of(model, **place).plan
            place["host_memory"] = plan.budget.buffers + plan.host_slot_nbytes
        encoded = run(model, **place)
    assert encoded[0] == raw[0]
    assert encoded[1] < 0.85 * raw[1]  # with their tables


def test_unsupported_lossless_settings_are_reported(
    model, converted, mxfp4_checkpoint, monkeypatch
):
    """Without its kernel, a device uses raw weights unless lossless is required."""
    required = {"device": "cuda", "link_format": "lossless"}
    with fake_gpu(monkeypatch):
        spec = spec_of(model, device="cuda", sidecar=str(converted))
        assert spec.target.link.sidecar is None and "GPU is fake" in spec.notice
        with pytest.raises(OffloadError, match="GPU is fake"):
            spec_of(model, **required)
    with fake_gpu(monkeypatch, has_kernels=True):
        least = budget(model, **required)
        with pytest.raises(OffloadError, match="of 6 on disk"):
            spec_of(model, host_memory="18MB", device_memory=least, **required)
    with pytest.raises(SettingsError, match="mxfp4"):
        spec_of(mxfp4_checkpoint, link_format="lossless")
