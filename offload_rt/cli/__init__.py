"""Commands, flags, tables, progress, process start and exit."""

import sys

if sys.platform != "linux":  # before an import fails for a reason that names no system
    print("error: offload_rt needs Linux; on Windows use WSL 2", file=sys.stderr)
    sys.exit(3)
