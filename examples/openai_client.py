"""Start the server and send it a request through OpenAI's client."""

import re
import subprocess
import sys

from demo import DRAFT, TARGET
from openai import OpenAI

PAIR = ["--model", TARGET, "--draft-model", DRAFT, "--max-model-len", "256"]
COMMAND = [sys.executable, "-m", "offload_rt.serve", *PAIR, "--port", "0"]

with subprocess.Popen(COMMAND, stderr=subprocess.PIPE, text=True) as server:
    try:
        # The server prints its address when it accepts requests.
        addresses = (re.search(r"http://[\d.]+:\d+", line) for line in server.stderr)
        address = next(match.group() for match in addresses if match)
        client = OpenAI(base_url=f"{address}/v1", api_key="unused")
        model = client.models.list().data[0].id
        stream = client.completions.create(
            model=model, prompt="Plants make food from", max_tokens=24, stream=True
        )
        for chunk in stream:
            print(chunk.choices[0].text, end="", flush=True)
        print()
    finally:
        server.terminate()
