"""`python -m offload_rt.plan`: see `offload_rt.cli.plan`."""

import sys

from offload_rt.cli.plan import main
from offload_rt.cli.process import run_program

if __name__ == "__main__":
    sys.exit(run_program(main))
