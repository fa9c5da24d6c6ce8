"""Ask about images. The model is tiny and random, so its answers have no meaning."""

import runpy
from pathlib import Path
from tempfile import TemporaryDirectory

from demo import MODELS
from PIL import Image

from offload_rt import LLM, SamplingParams

SCRIPT = MODELS.parent / "scripts" / "write_vision.py"

with TemporaryDirectory() as folder:
    runpy.run_path(str(SCRIPT))["write_vision"](Path(folder))
    picture = Path(folder, "picture.png")
    Image.linear_gradient("L").save(picture)
    answers = []
    with LLM(folder, max_model_len=128) as llm:
        # A path, or an image of Pillow.
        for image in (picture, Image.new("RGB", (64, 48), "teal")):
            content = [{"type": "image", "image": image}, {"type": "text", "text": "Describe it."}]
            params = SamplingParams(max_tokens=8, temperature=0)
            (output,) = llm.chat([{"role": "user", "content": content}], params)
            print(f"{len(output.prompt_token_ids)} tokens of prompt: {output.text!r}")
            answers.append(output.text)

print("the answer depends on the image:", answers[0] != answers[1])
