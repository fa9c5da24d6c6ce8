"""llama.cpp on the job's GGUF file: a process of node with the prebuilt package node-llama-cpp.

Torch is not imported, so that a memory limit belongs to llama.cpp.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import psutil

from bench.common.checkpoints import gguf_model
from bench.common.measure import AVX2_ENVIRONMENT, ROOT
from bench.compare.contract import Answer, Job, Supply, System
from offload_rt.errors import SettingsError
from offload_rt.weights.gguf import read_gguf

# `make compare` installs it.
PACKAGE = ROOT / "build/node/node_modules/node-llama-cpp"
# Variants of the library for CPUs without AVX-512 and AVX-VNNI.
_AVX2_VARIANTS = ("x64", "sse42", "sandybridge", "ivybridge", "haswell")
_SCRIPT = Path(__file__).with_name("llama_cpp.mjs")


def unfit() -> str | None:
    """Return what is missing."""
    if shutil.which("node") is None or not PACKAGE.exists():
        return "needs node, and npm install --prefix build/node node-llama-cpp"
    return None


def _package() -> Path:
    """Return the package, which selects its instructions by itself.

    Where torch is restricted to AVX2, return a copy without the library's later variants.
    """
    if not os.environ.keys() >= AVX2_ENVIRONMENT.keys():
        return PACKAGE
    source = PACKAGE.parent
    copied = ROOT / "build/node-avx2/node_modules"
    if not copied.exists():
        shutil.copytree(source, copied, symlinks=True, copy_function=os.link)
        for variant in copied.glob("@node-llama-cpp/linux-x64*/bins/*/libggml-cpu-*.so"):
            if variant.stem.removeprefix("libggml-cpu-") not in _AVX2_VARIANTS:
                variant.unlink()
    return copied / PACKAGE.name


class LlamaCppPeer:
    """A model in a process of node, which answers a line of JSON by a line of JSON."""

    def __init__(self, command: list[str], supply: Supply) -> None:
        self.supply = supply
        self._node = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._read()

    def _read(self) -> dict[str, list]:
        line = self._node.stdout.readline()
        if not line:
            raise RuntimeError(f"node ended with exit code {self._node.wait()}")
        return json.loads(line)

    def generate(self, prompt: list[int], n: int) -> Answer:
        """Continue a prompt greedily; see `Peer`. Tokens of one pass arrive together."""
        print(json.dumps({"prompt": prompt, "n": n}), file=self._node.stdin, flush=True)
        answer = self._read()
        return Answer(answer["token_ids"], [(s, n) for s, n in answer["arrivals"]])

    def close(self) -> None:
        """End the process."""
        self._node.stdin.close()
        self._node.wait()


def load(job: Job, draft: Path | None = None) -> LlamaCppPeer:
    """Load the job's GGUF file on all cores, mapped under a memory limit.

    A pass reads all weights but an embedding that is no output matrix; under a limit the excess
    comes from the disk.
    """
    if job.gguf is None:
        raise SettingsError("llama.cpp reads GGUF files only", have=str(job.model))
    records = read_gguf(job.gguf)[1]
    is_read = {"model.embed_tokens.weight": "lm_head.weight" not in records}
    nbytes = sum(record.nbytes for name, record in records.items() if is_read.get(name, True))
    supply = Supply("memory", nbytes)
    if job.limit is not None:
        supply = Supply("disk", max(nbytes - job.limit, 0))
    settings = {
        "package": str(_package() / "dist/index.js"),
        "path": str(job.gguf),
        "draft": draft and str(draft),
        "mapped": job.limit is not None,
        "max_len": job.max_len,
        "threads": psutil.cpu_count(logical=False),
    }
    return LlamaCppPeer(["node", str(_SCRIPT), json.dumps(settings)], supply)


def _load_assisted(job: Job) -> LlamaCppPeer:
    """Load a second model as well, which proposes a chain of 6 tokens."""
    return load(job, gguf_model(job.draft, "BF16", job.scratch))


def _load_mapped(job: Job) -> LlamaCppPeer:
    """Load the file, whose pages the kernel evicts and reads again in each pass.

    The limit of the control group is the budget and the imports. Raises SettingsError without it.
    """
    if job.limit is None:
        change = "run as root, or give --cgroup"
        raise SettingsError("needs a control group with a memory limit", change=change)
    return load(job)


PEERS = {
    "llama_cpp": System("llama.cpp", load, unfit=unfit),
    "llama_cpp_assisted": System("llama.cpp, assisted", _load_assisted, drafts=True, unfit=unfit),
    "llama_cpp_mapped": System(
        "llama.cpp, mapped within the budget", _load_mapped, unfit=unfit, limited=True
    ),
}
