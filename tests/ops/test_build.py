"""Builds of csrc/ at runtime: once, under a name derived from the sources, and never partially."""

import ctypes
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import build_kernels
import pytest
import torch
from support.fake_gpu import fake_gpu
from support.processes import is_running, is_written
from support.programs import wait_until

from offload_rt.ops import build, cpu, extension
from offload_rt.ops.build import NotBuilt, Recipe


@pytest.mark.parametrize("setting", ["0", "none", ""])
def test_library_of_the_package_has_priority_and_build_can_be_off(setting, folders, monkeypatch):
    monkeypatch.setenv("OFFLOAD_RT_BUILD", setting)
    here = replace(TINY, name="here")
    if setting:
        with pytest.raises(NotBuilt, match=f"OFFLOAD_RT_BUILD is {setting}"):
            find(TINY)
    (folders / "package" / TINY.file).write_bytes(b"")
    assert find(TINY, here) == folders / "package" / TINY.file
    assert calls(folders) == []


TINY = Recipe("tiny", "compiler", ("-shared", "-fPIC", "tiny.cpp"))


def find(*recipes: Recipe) -> Path:
    return build.load(Path, *recipes)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One-line sources, a package without libraries, an empty cache, a compiler that logs calls."""
    for name in ("csrc", "package", "bin"):
        (tmp_path / name).mkdir()
    (tmp_path / "csrc" / "tiny.cpp").write_text('extern "C" int answer() { return 42; }')
    monkeypatch.setattr(build, "SOURCES", tmp_path / "csrc")
    monkeypatch.setattr(build, "PACKAGE", tmp_path / "package")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    for variable in ("CUDA_HOME", "CUDA_PATH", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(build, "SYSTEM_CUDA", tmp_path / "system")
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda _: None)
    compiler(tmp_path, 'exec g++ "$@"')
    return tmp_path


def compiler(folder: Path, does: str) -> None:
    script = folder / "bin" / "compiler"
    script.write_text(f"#!/bin/sh\necho $$ >> {folder / 'calls'}\n{does}\n")
    script.chmod(0o755)


def calls(folder: Path) -> list[int]:
    path = folder / "calls"
    return [*map(int, path.read_text().split())] if path.exists() else []


def test_library_is_built_once_in_the_cache(folders, capfd, monkeypatch):
    """By the compiler of the environment with its arguments, too."""
    with ThreadPoolExecutor(2) as pool:  # the second waits for the first
        paths = {future.result() for future in [pool.submit(find, TINY) for _ in range(2)]}
    assert len(calls(folders)) == 1
    assert capfd.readouterr().err == "building csrc/ (tiny) with compiler, once for this machine\n"
    (path,) = paths
    assert path.is_relative_to(folders / "cache" / "offload_rt")
    assert ctypes.CDLL(str(path)).answer() == 42
    monkeypatch.setenv("CXX", f"{folders / 'bin' / 'compiler'} -DUSED")
    assert ctypes.CDLL(str(find(replace(TINY, compiler="g++")))).answer() == 42
    assert len(calls(folders)) == 2


def test_library_depends_on_sources_and_flags_but_not_on_torch(folders, monkeypatch):
    names = [TINY.file, replace(TINY, arguments=("-O0", *TINY.arguments)).file]
    (folders / "csrc" / "tiny.h").write_text("// new")
    names.append(TINY.file)
    assert len(set(names)) == 3
    monkeypatch.setattr(torch, "__version__", "9.9")
    for_cpu = replace(TINY, compiler="g++")
    before = for_cpu.file
    (folders / "csrc" / "tiny_cpu.h").write_text("// new")
    assert TINY.file == names[-1] and for_cpu.file != before


def test_prebuilt_library_that_fails_to_load_is_built(folders, capfd):
    """For example one that needs a newer glibc."""
    (folders / "package" / TINY.file).write_bytes(b"not a library")
    library = build.load(lambda path: ctypes.CDLL(str(path)), TINY)
    assert library.answer() == 42 and library._name.startswith(str(folders / "cache"))
    assert "does not load: " in (err := capfd.readouterr().err) and "file too short" in err
    assert build.origin(library._name) == "built"
    assert build.origin(str(folders / "package" / TINY.file)) == "prebuilt"


def test_failed_build_is_reported_and_not_repeated(folders):
    compiler(folders, "echo out of luck; exit 1")
    with pytest.raises(NotBuilt, match=r"compiler failed: see (.+\.failed)") as caught:
        find(TINY)
    log = next((folders / "cache" / "offload_rt" / "kernels").glob("*.failed"))
    assert str(log) in str(caught.value) and log.read_text() == "out of luck\n"
    with pytest.raises(NotBuilt, match="failed before"):
        find(TINY)
    assert len(calls(folders)) == 1
    log.unlink()
    compiler(folders, "kill -KILL $$")
    with pytest.raises(NotBuilt, match="compiler failed"):
        find(TINY)
    compiler(folders, 'exec g++ "$@"')
    log.unlink()
    find(TINY).unlink()
    assert find(TINY).exists(), "the log of a successful build prevents no build"


def test_nvcc_is_found_outside_of_path(folders, monkeypatch):
    """Search order: pip, system, PATH, CUDA_PATH, CUDA_HOME; later places have priority."""
    homes = [
        folders / "nvidia" / "cu13", folders / "system", folders, folders / "path",
        folders / "home",
    ]  # fmt: skip
    pip = SimpleNamespace(submodule_search_locations=[str(folders / "nvidia")])
    monkeypatch.setattr(
        build.importlib.util, "find_spec", lambda name: pip if name == "nvidia" else None
    )
    monkeypatch.setenv("PATH", str(folders / "bin"))
    for home, variable in zip(homes, (None, None, None, "CUDA_PATH", "CUDA_HOME"), strict=True):
        (home / "bin").mkdir(parents=True, exist_ok=True)
        (home / "bin" / "nvcc").write_text("")
        (home / "bin" / "nvcc").chmod(0o755)
        if variable:
            monkeypatch.setenv(variable, str(home))
        assert build.find_compiler("nvcc") == str(home / "bin" / "nvcc")


def test_libraries_beside_nvcc_are_found(folders):
    """nvcc searches lib64, but pip's packages have lib."""
    (folders / "lib").mkdir()
    find(TINY).rename(folders / "lib" / "libanswer.so")
    (folders / "bin" / "compiler").rename(folders / "bin" / "nvcc")
    arguments = (*TINY.arguments, "-lanswer")
    assert find(replace(TINY, compiler="nvcc", arguments=arguments)).exists()


def test_missing_compiler_or_folder_has_a_reason(folders, monkeypatch):
    with pytest.raises(NotBuilt, match="no-such-compiler not found"):
        find(replace(TINY, compiler="no-such-compiler"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folders / "csrc" / "tiny.cpp"))
    with pytest.raises(NotBuilt, match="Not a directory"):
        find(TINY)


def test_interrupt_ends_the_compiler_and_leaves_no_file(folders, monkeypatch):
    def interrupted(*_: object, **__: object) -> None:
        wait_until(lambda: is_written(folders / "calls"))
        raise KeyboardInterrupt

    compiler(folders, "sleep 60")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(subprocess.Popen, "communicate", interrupted)
        find(TINY)
    wait_until(lambda: not is_running(calls(folders)[0]))
    compiler(folders, 'exec g++ "$@"')
    assert find(TINY).exists()  # it is no build that failed


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch report devices of compute capability 8.9 and 12.0."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", [(8, 9), (12, 0)].__getitem__)
    monkeypatch.setattr(extension, "missing", extension.missing.__wrapped__)
    monkeypatch.setattr(extension, "_is_supported", extension._is_supported.__wrapped__)


@pytest.mark.parametrize("release", [12.7, 12.8])
def test_kernels_are_built_for_the_present_devices(card, folders, monkeypatch, release):
    """For 12.0 by a compiler that knows it; else the card compiles the PTX of 9.0."""
    compiler(folders, f"echo Cuda compilation tools, release {release}, V{release}.61")
    (folders / "bin" / "compiler").rename(folders / "bin" / "nvcc")
    asked: list[Recipe] = []
    monkeypatch.setattr(build, "load", lambda opener, *recipes: asked.extend(recipes))
    monkeypatch.setattr(extension, "_launch_failure", lambda: "")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert extension.missing() == ""
    codes = [{flag for flag in recipe.arguments if flag.startswith("-gencode")} for recipe in asked]
    assert [len(flags) for flags in codes] == [6, 5, 3]
    last = {12.7: "90", 12.8: "120"}[release]
    pairs = ("89", "sm_89"), (last, f"sm_{last}"), (last, f"compute_{last}")
    assert codes[2] == {f"-gencode=arch=compute_{a},code={b}" for a, b in pairs}


def test_libraries_of_this_machine_are_built_into_the_package(card, folders, monkeypatch):
    """Programs with another cache find them without a further build."""
    compiler(
        folders,
        'case "$1" in --version) echo release 12.8 ;; *) '
        'while [ "$1" != -o ]; do shift; done; echo > "$2" ;; esac',
    )
    for name in ("nvcc", "g++"):
        (folders / "bin" / name).symlink_to(folders / "bin" / "compiler")
    monkeypatch.setattr(sys, "argv", ["build_kernels.py", "--this-machine"])
    build_kernels.main()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folders / "another"))
    monkeypatch.setenv("OFFLOAD_RT_BUILD", "0")
    kernels = find(*map(build.kernels, (build.ALL_ARCHITECTURES, build.ARCHITECTURES, {89, 120})))
    assert {kernels, find(build.cpu(cpu.level()))} == {*(folders / "package").glob("*.so")}


def test_kernels_that_load_but_fail_are_missing(card, monkeypatch):
    """For example kernels of a compiler newer than the driver."""

    def failed(*_: object) -> None:
        raise RuntimeError("launch of a kernel: CUDA driver version is insufficient\nmore")

    missing = extension.missing
    with fake_gpu(monkeypatch):
        monkeypatch.setattr(extension, "missing", missing)
        monkeypatch.setattr(extension, "kernels", lambda: SimpleNamespace(silu_mul=failed))
        monkeypatch.setattr(build, "load", lambda *_: None)
        assert "CUDA driver version is insufficient; update the driver" in extension.missing()


def test_device_without_kernels_reports_the_loss(card, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert extension.missing() == "nvcc not found"
    monkeypatch.setattr(extension, "serves", lambda x: False)
    told = extension.notice(torch.device("meta"))  # stands for a card
    assert "nvcc not found" in told and "plain torch" in told and "\n" not in told
    assert extension.notice(torch.device("cpu")) == ""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert extension.missing() == "they need compute capability 8.0"
