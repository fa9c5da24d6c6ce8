from pathlib import Path

from setuptools import find_packages, setup

# Bounded above: an unbounded torch fetches gigabytes of CUDA on a machine that has a CPU build at
# hand.
TORCH = "torch>=2.11,<2.14"
SERVER = ["fastapi>=0.115,<1", "uvicorn>=0.30,<1", "prometheus-client>=0.20,<1"]

setup(
    name="offload-rt",
    version="0.1.0",
    description=(
        "Run a language model larger than its device's memory, exactly, at the speed of the link"
    ),
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    # 3.14 was not tried.
    python_requires=">=3.11,<3.14",
    classifiers=["Operating System :: POSIX :: Linux"],
    entry_points={"console_scripts": ["offload-rt = offload_rt.cli.main:script"]},
    packages=find_packages(include=["offload_rt", "offload_rt.*"]),
    # Sources, not libraries: those are built where they are to run, by the torch that is there
    # (offload_rt/ops/build.py).
    package_data={
        "offload_rt": ["csrc/*"],
        "offload_rt.planning": ["known_models.json"],
        "offload_rt.server": ["page/*"],
    },
    install_requires=[
        TORCH,
        # 5.20 lacks `core_model_loading.apply_renamings`.
        "transformers>=5.21,<6",
        "safetensors>=0.8,<1",
        "tokenizers>=0.23.1,<1",
        "huggingface-hub>=1.31,<3",
        "numpy>=2.1,<3",
        "numba>=0.62,<1",
        "psutil>=6,<8",
        "nvidia-ml-py>=12.560.30,<15",
        "rich>=13.9,<16",
    ],
    extras_require={
        "dev": [
            *SERVER,
            "openai>=1.60,<3",
            "selenium>=4.20,<5",
            "pytest>=8.3,<10",
            "pytest-xdist>=3.6.1,<4",
            "hypothesis>=6.120,<7",
            "ruff>=0.12,<1",
            "mypy>=1.18.1,<3",
            "matplotlib>=3.9,<4",
            # The tests' oracle of quantised checkpoints.
            "compressed-tensors>=0.20,<0.21",
            "gguf>=0.17,<1",
            "accelerate>=1.15,<1.16",
        ],
        # What `make compare` runs beside offload_rt, at the versions it was tried with.
        "compare": [
            TORCH,
            "accelerate>=1.15,<1.16",
            "deepspeed>=0.19.8,<0.20",
            "matplotlib>=3.9,<4",
            # Compiled on installation, half an hour on two cores (Makefile, LLAMA_CMAKE).
            "llama-cpp-python>=0.3.36,<0.4",
        ],
        "server": SERVER,
        "plot": ["matplotlib>=3.9,<4"],
    },
)
