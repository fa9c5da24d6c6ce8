"""Graphics cards by what their vendor says of them, and the links they hang on by what is really
reached.

Rates of matrix products are dense, of fp16 or bf16, summed in fp32, which is what exact inference
uses: on GeForce cards that is half of the rate with sums in fp16, and a quarter of the figure with
sparsity that is advertised. The vendor's documents were not at hand: "as cited" are figures that
resellers and reviews give from the named document, "remembered" those that nobody looked up.
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
    "; rate of matrix products from its tensor cores, 64 products a clock each, and its boost clock"
)
# Of its 141 GB an H200 shows 143771 MiB. GDDR6 cards for data centres check and correct their
# memory, which takes a sixteenth of it: nvidia-smi shows 23034 MiB of an L4 and 46068 MiB of an L40
# (all remembered).
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
    """The card of a name like `rtx4090`, in whatever case and with or without blanks and hyphens.

    Raises SettingsError for one that is not known.
    """
    plain = "".join(letter for letter in name.lower() if letter.isalnum()).removeprefix("geforce")
    for card in CARDS:
        if card.name == plain:
            return card
    known = ", ".join(card.name for card in CARDS)
    raise SettingsError(
        f"--gpu {name!r} is not known", have=f"{known}, this", change="use one of these"
    )
