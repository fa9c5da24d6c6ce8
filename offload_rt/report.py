"""`python -m offload_rt.report`: see `offload_rt.cli.report`."""

from offload_rt.cli.main import script

if __name__ == "__main__":
    script("report")
