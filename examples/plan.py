"""Predict placement and time of a 70B model on a 24 GB GPU, without the model and the GPU."""

import subprocess
import sys

PAIR = ["--model", "llama2-70b", "--draft-model", "llama2-7b"]
MACHINE = ["--gpu", "rtx4090", "--ram", "160GiB"]

subprocess.run([sys.executable, "-m", "offload_rt.plan", *PAIR, *MACHINE], check=True)
