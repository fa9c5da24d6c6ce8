"""Images of `offload-rt run` and `offload-rt chat`."""

import io
import re
import sys

from PIL import Image
from support.serving import MODELS
from write_vision import write_vision

from offload_rt.cli import chat, run


def test_chat_and_run_read_the_same_image(tmp_path, monkeypatch, capfd):
    model, path = tmp_path / "model", tmp_path / "a.png"
    write_vision(model)
    Image.linear_gradient("L").save(path)
    flags = ["--device", "cpu", "--max-model-len", "128", "--max-tokens", "6", "--quiet"]
    lines = f"/image {path}\nWhat?\n/stats\n/reset\nWhat?\n".encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
    assert chat.main([str(model), *flags]) == 0
    out, err = capfd.readouterr()
    with_image, without = out.splitlines()
    assert with_image != without
    n_tokens = re.search(r"the conversation has (\d+) of 128 tokens", err)
    assert n_tokens is not None and int(n_tokens[1]) > 16 + 6, "an image has 16 tokens"
    assert run.main([str(model), "What?", "--chat", "--image", str(path), *flags]) == 0
    assert capfd.readouterr().out.splitlines() == [with_image]
    for wrong, message in (
        (["--image", "x.png"], "--image: needs --chat"),
        (["--chat", "--image", "/nowhere.png"], "/nowhere.png cannot be read"),
    ):
        assert run.main([str(MODELS / "demo-target"), "x", "--device", "cpu", *wrong]) == 2
        assert message in capfd.readouterr().err
