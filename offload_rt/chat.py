"""`python -m offload_rt.chat`: see `offload_rt.cli.chat`."""

from offload_rt.cli.main import script

if __name__ == "__main__":
    script("chat")
