"""Settings of `offload-rt plan`."""

from dataclasses import dataclass

from offload_rt.config import EngineConfig, check_settings, setting
from offload_rt.errors import SettingsError
from offload_rt.planning.hardware import parse_rate
from offload_rt.sampling_params import SamplingParams

# Defaults of the machine.
RAM = "64GiB"
DISK = "7GB/s"


@dataclass(frozen=True)
class PlanSettings:
    """Settings of a plan besides the engine's."""

    gpu: str = setting(
        "this",
        "GPU like rtx4090 or rtx4060laptop, see --list-gpus; or its memory, memory rate, matrix"
        " product rate and link rate like 16GiB,300GB/s,80TFLOPS,25GB/s; this: this machine,"
        " measured",
    )
    ram: str | None = setting(None, f"host memory, default {RAM}; with --gpu this: the free memory")
    disk: str | None = setting(
        None,
        f"read rate of the disk, or of each of several mirrors like 7GB/s,3GB/s; default {DISK};"
        " with --gpu this: measured",
    )
    link: str | None = setting(
        None, "rate of the host-to-card link, default: measured rate of its PCIe version"
    )
    temperature: float = setting(0.0, "sampling temperature")
    acceptance: str = setting(
        "auto", "acceptance of drafted tokens: name of a preset, or probabilities by rank; "
        "auto: measured on this machine, else a preset of this pair, else a guess"
    )  # fmt: skip
    context: int = setting(128, "tokens before the first pass", least=1)
    max_new_tokens: int = setting(128, "generated tokens")
    ranks: int = setting(1, "cards of the machine; each computes a shard of every layer", least=1)
    shared_link: bool = setting(False, "each pair of ranks shares a host-to-card link")
    network: str | None = setting(
        None, "rate between ranks, default: NVLink, else through host memory"
    )
    sweep: str | None = setting(
        None, "print the forecast over a range of host or device memory", choices=("ram", "memory")
    )
    compare_drafters: bool = setting(
        False, "print forecasts of published drafters of the model, fastest first"
    )
    json: bool = setting(False, "print one JSON object instead of tables")

    disk_source: str = "disk: set by --disk"  # no flag

    def __post_init__(self) -> None:
        SamplingParams(temperature=self.temperature, max_new_tokens=self.max_new_tokens)
        check_settings(self)

    @property
    def disk_gbps(self) -> float:
        """Total rate of the disks, set or assumed. Raises SettingsError."""
        return sum(parse_rate(rate, "--disk") for rate in (self.disk or DISK).split(","))

    def check(self, config: EngineConfig) -> None:
        """Raise SettingsError for contradictory settings."""
        given = {"--link": self.link, "--ranks": self.ranks > 1, "--pipeline": config.pipeline > 1}
        flags = [flag for flag, value in given.items() if value]
        if flags and self.gpu == "this":
            change = "name a card with --gpu"
            raise SettingsError(flags[0], need="a card by name", have="--gpu=this", change=change)
        if {"--ranks", "--pipeline"} <= {*flags}:
            change = "omit --ranks or --pipeline"
            raise SettingsError("--ranks", need="no --pipeline", have="both", change=change)
