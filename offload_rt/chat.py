"""`python -m offload_rt.chat`: see `offload_rt.cli.chat`."""

import sys

from offload_rt.cli.chat import main
from offload_rt.cli.process import run_program

if __name__ == "__main__":
    sys.exit(run_program(main))
