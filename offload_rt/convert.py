"""`python -m offload_rt.convert`: see `offload_rt.cli.convert`."""

from offload_rt.cli.main import script

if __name__ == "__main__":
    script("convert")
