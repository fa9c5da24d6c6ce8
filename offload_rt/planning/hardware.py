"""GPU specifications of the vendors, and measured rates of PCIe links.

Matrix product rates are dense, in fp16 or bf16 with fp32 sums, as exact inference uses. On GeForce
cards this is half of the rate with fp16 sums, and a quarter of the advertised sparse rate.
The vendor's documents were not available. "As cited" marks figures quoted from the named document
by resellers and reviews. "Remembered" marks figures without a look-up.
"""

from offload_rt.cost.card import Card, HostLink
from offload_rt.errors import SettingsError

_GIB = 2**30


PCIE_4 = HostLink(
    "PCIe 4.0 x16",
    25.0,
    "measured peak of an A100 by the authors of BaM (github.com/ZaidQureshi/bam, issue 54)",
)
PCIE_5 = HostLink(
    "PCIe 5.0 x16",
    55.0,
    "NVIDIA's example output of nvbandwidth, host_to_device_memcpy_ce: 55.63 GB/s",
)

_ADA = "vendor specification: NVIDIA Ada GPU Architecture whitepaper"
_GA102 = "vendor specification: NVIDIA Ampere GA102 GPU Architecture whitepaper"
_BLACKWELL = "vendor specification: NVIDIA RTX Blackwell GPU Architecture whitepaper"
_SHEET = "vendor specification: NVIDIA {} data sheet"
_CITED = ", as cited"
_CACHED = ", remembered"
_DERIVED = (
    "; matrix product rate computed from tensor cores, 64 products per clock each, and boost clock"
)
# An H200 of 141 GB shows 143771 MiB. Error correction uses a sixteenth of the GDDR6 memory of data
# centre cards: nvidia-smi shows 23034 MiB on an L4 and 46068 MiB on an L40 (all remembered).
CARDS = (
    Card(
        "rtx3060",
        "GeForce RTX 3060 12 GB",
        12 * _GIB,
        25.5,
        360.0,
        PCIE_4,
        _GA102 + _CACHED + _DERIVED,
    ),
    Card("rtx3090", "GeForce RTX 3090", 24 * _GIB, 71.0, 936.0, PCIE_4, _GA102 + _CACHED),
    Card(
        "rtx4070ti",
        "GeForce RTX 4070 Ti",
        12 * _GIB,
        80.2,
        504.0,
        PCIE_4,
        _ADA + _CACHED + _DERIVED,
    ),
    Card("rtx4080", "GeForce RTX 4080", 16 * _GIB, 97.5, 716.8, PCIE_4, _ADA + _CACHED),
    Card("rtx4090", "GeForce RTX 4090", 24 * _GIB, 165.2, 1008.0, PCIE_4, _ADA + _CITED),
    Card("rtx5090", "GeForce RTX 5090", 32 * _GIB, 209.5, 1792.0, PCIE_5, _BLACKWELL + _CITED),
    Card("l4", "L4", 24 * _GIB * 15 // 16, 121.0, 300.0, PCIE_4, _SHEET.format("L4") + _CITED),
    Card("l40", "L40", 48 * _GIB * 15 // 16, 181.05, 864.0, PCIE_4, _SHEET.format("L40") + _CITED),
    Card(
        "a100",
        "A100 80 GB SXM",
        80 * _GIB,
        312.0,
        2039.0,
        PCIE_4,
        _SHEET.format("A100") + _CITED,
        300.0,
    ),
    Card(
        "h100",
        "H100 80 GB SXM",
        80 * _GIB,
        989.0,
        3350.0,
        PCIE_5,
        _SHEET.format("H100") + _CITED,
        450.0,
    ),
    Card(
        "h200",
        "H200 141 GB SXM",
        140 * _GIB,
        989.0,
        4800.0,
        PCIE_5,
        _SHEET.format("H200") + _CITED,
        450.0,
    ),
)


def find_card(name: str) -> Card:
    """Find a card by a name like `rtx4090`, ignoring case, blanks and hyphens.

    Raises SettingsError for an unknown name.
    """
    plain = "".join(letter for letter in name.lower() if letter.isalnum()).removeprefix("geforce")
    for card in CARDS:
        if card.name == plain:
            return card
    known = ", ".join(card.name for card in CARDS)
    raise SettingsError(
        f"--gpu {name!r} is not known", have=f"{known}, this", change="use one of these"
    )
