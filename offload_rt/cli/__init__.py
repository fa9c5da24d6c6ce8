"""What a person sees: the verbs, their flags, tables and bars, begin and end of a process."""

import sys

if sys.platform != "linux":  # before something is missed that this system has not
    print("error: offload_rt needs Linux; on Windows use WSL 2", file=sys.stderr)
    sys.exit(3)
