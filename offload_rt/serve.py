"""`python -m offload_rt.serve`: see `offload_rt.cli.serve`."""

import sys

from offload_rt.cli.process import run_program
from offload_rt.cli.serve import main

if __name__ == "__main__":
    sys.exit(run_program(main))
