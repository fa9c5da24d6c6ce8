"""`python -m offload_rt.run`: see `offload_rt.cli.run`."""

from offload_rt.cli.main import script

if __name__ == "__main__":
    script("run")
