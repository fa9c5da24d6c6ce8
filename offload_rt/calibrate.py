"""`python -m offload_rt.calibrate`: see `offload_rt.cli.calibrate`."""

import sys

from offload_rt.cli.calibrate import main
from offload_rt.cli.process import run_program

if __name__ == "__main__":
    sys.exit(run_program(main))
