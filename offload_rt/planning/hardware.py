"""GPU specifications of the vendors, and measured rates of PCIe links.

Matrix product rates are dense, in fp16 or bf16 with fp32 sums, as exact inference uses. On GeForce
cards this is half of the rate with fp16 sums, and a quarter of the advertised sparse rate. Most
rates are computed from multiprocessors and boost clock: 512 operations per clock on GeForce cards,
1024 on workstation cards. Laptops with a low power limit are slower.
The vendor's documents were not available. "As cited" marks figures quoted from the named document
by resellers and reviews. "Remembered" marks figures without a look-up.
"""

import csv
from difflib import get_close_matches
from pathlib import Path

from offload_rt.config import parse_size
from offload_rt.cost.card import Card, HostLink
from offload_rt.errors import SettingsError

_PCIE_4 = "measured peak of an A100 by the authors of BaM (github.com/ZaidQureshi/bam, issue 54)"
_PCIE_5 = "NVIDIA's example output of nvbandwidth, host_to_device_memcpy_ce: 55.63 GB/s"
_HALF = "half of 16 lanes: "

LINKS = {
    "4x16": HostLink("PCIe 4.0 x16", 25.0, _PCIE_4),
    "4x8": HostLink("PCIe 4.0 x8", 12.5, _HALF + _PCIE_4),
    "5x16": HostLink("PCIe 5.0 x16", 55.0, _PCIE_5),
    "5x8": HostLink("PCIe 5.0 x8", 27.5, _HALF + _PCIE_5),
}
_WHITEPAPER = (
    "vendor specification: NVIDIA {} GPU Architecture whitepaper, memory as cited, matrix product"
    " rate computed"
)
# Column `source` of cards.csv.
_SOURCES = {
    "ga102": _WHITEPAPER.format("Ampere GA102"),
    "ada": _WHITEPAPER.format("Ada"),
    "blackwell": _WHITEPAPER.format("RTX Blackwell"),
    "ada cited": "vendor specification: NVIDIA Ada GPU Architecture whitepaper, as cited",
    "blackwell cited": "vendor specification: NVIDIA RTX Blackwell GPU Architecture whitepaper,"
    " as cited",
    "sheet": "vendor specification: NVIDIA's data sheet, remembered, matrix product rate computed",
    "sheet cited": "vendor specification: NVIDIA's data sheet, as cited",
}
_FIGURES = "16GiB,300GB/s,80TFLOPS,25GB/s"


# An H200 of 141 GB shows 143771 MiB. Error correction uses a sixteenth of the GDDR6 memory of data
# centre cards: nvidia-smi shows 23034 MiB on an L4 and 46068 MiB on an L40 (remembered).
_TABLE = Path(__file__).with_name("cards.csv").read_text(encoding="utf-8")
CARDS = tuple(
    Card(
        row["name"],
        row["title"],
        int(float(row["memory_gib"]) * 2**30),
        float(row["tflops"]),
        float(row["memory_gbps"]),
        LINKS[row["link"]],
        _SOURCES[row["source"]],
        float(row["nvlink_gbps"] or 0),
    )
    for row in csv.DictReader(_TABLE.splitlines())
)


def find_card(name: str) -> Card:
    """Find a card by its name or by its figures.

    name  like `rtx4090` or `GeForce RTX 4060 Laptop GPU`, or memory, memory rate, matrix product
          rate and link rate: `16GiB,300GB/s,80TFLOPS,25GB/s`
    Raises SettingsError for an unknown name and for wrong figures.
    """
    if "," in name:
        return _card_of_figures(name)
    plain = "".join(letter for letter in name.lower() if letter.isalnum())
    for word in ("nvidia", "geforce", "generation", "gpu"):
        plain = plain.replace(word, "")
    by_name = {card.name: card for card in CARDS}
    if plain in by_name:
        return by_name[plain]
    close = ", ".join(get_close_matches(plain, by_name, n=3, cutoff=0.5))
    hint = f"did you mean {close}? " if close else ""
    change = f"{hint}--list-gpus prints all; or give its figures like {_FIGURES}"
    raise SettingsError(f"--gpu={name} is not known", change=change)


def _card_of_figures(text: str) -> Card:
    parts = [part.strip() for part in text.split(",")]
    need = f"memory, memory rate, matrix product rate and link rate like {_FIGURES}"
    try:
        memory, memory_rate, products, link_rate = parts
        tflops = float(products.upper().removesuffix("TFLOPS"))
    except ValueError:
        tflops = 0.0
    if tflops <= 0:
        raise SettingsError("--gpu", need=need, have=text)
    link = HostLink("host link", parse_rate(link_rate, "--gpu"), "set by --gpu")
    return Card(
        "custom", f"GPU of {memory}", parse_size(memory), tflops, parse_rate(memory_rate, "--gpu"),
        link, "set by --gpu",
    )  # fmt: skip


def parse_rate(text: str, flag: str) -> float:
    """Parse a rate like "7GB/s" to GB/s. Raises SettingsError."""
    amount, _, per = text.partition("/")
    try:
        rate = parse_size(amount) / 1e9 if per.strip().lower() == "s" else 0.0
    except SettingsError:
        rate = 0.0
    if rate <= 0:
        change = 'write it like "7GB/s" or "800MB/s"'
        raise SettingsError(f"{flag} is {text!r}", need="a rate", change=change)
    return rate
