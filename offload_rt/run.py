"""`python -m offload_rt.run`: see `offload_rt.cli.run`."""

import sys

from offload_rt.cli.process import run_program
from offload_rt.cli.run import main

if __name__ == "__main__":
    sys.exit(run_program(main))
