"""`python -m offload_rt.calibrate`: see `offload_rt.cli.calibrate`."""

from offload_rt.cli.main import script

if __name__ == "__main__":
    script("calibrate")
