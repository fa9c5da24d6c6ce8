"""`python -m offload_rt.convert`: see `offload_rt.cli.convert`."""

import sys

from offload_rt.cli.convert import main
from offload_rt.cli.process import run_program

if __name__ == "__main__":
    sys.exit(run_program(main))
