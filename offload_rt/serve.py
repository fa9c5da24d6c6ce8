"""`python -m offload_rt.serve`: see `offload_rt.cli.serve`."""

from offload_rt.cli.main import script

if __name__ == "__main__":
    script("serve")
