"""`python -m offload_rt.report`: see `offload_rt.cli.report`."""

import sys

from offload_rt.cli.process import run_program
from offload_rt.cli.report import main

if __name__ == "__main__":
    sys.exit(run_program(main))
