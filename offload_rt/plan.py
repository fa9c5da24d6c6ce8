"""`python -m offload_rt.plan`: see `offload_rt.cli.plan`."""

from offload_rt.cli.main import script

if __name__ == "__main__":
    script("plan")
