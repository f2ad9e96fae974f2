# SPDX-License-Identifier: Apache-2.0
"""What is installed: the library's dependencies and exports, the wheel, what the scripts say when they cannot help."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import trtllm_mhc
from trtllm_mhc import plugin

ROOT = Path(__file__).parents[2]
# What every glibc system with a C++ run-time library has.
RUNTIME_LIBRARIES = {"libstdc++.so.6", "libgcc_s.so.1", "libm.so.6", "libc.so.6", "ld-linux-x86-64.so.2"}
TENSORRT_ENTRY_POINTS = {
    "getCreators",
    "setLoggerFinder",
    "getPluginRegistry",
    "createInferRuntime_INTERNAL",
    "createInferBuilder_INTERNAL",
}


def readelf(option: str) -> str:
    command = ["readelf", "--wide", option, str(plugin.library_path())]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def dynamic_symbols() -> list[tuple[str, str, str]]:
    """(binding, section, name[@version]) of every dynamic symbol."""
    rows = (line.split() for line in readelf("--dyn-syms").splitlines())
    return [(row[4], row[6], row[7]) for row in rows if len(row) >= 8 and row[0].rstrip(":").isdigit()]


def test_one_version_everywhere() -> None:
    with open(ROOT / "pyproject.toml", "rb") as file:
        declared = tomllib.load(file)["project"]["version"]
    assert trtllm_mhc.__version__ == declared
    assert plugin.load().mhcVersion().decode() == declared


def test_needs_only_the_runtime_libraries() -> None:
    dynamic = readelf("--dynamic")
    assert set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)) <= RUNTIME_LIBRARIES
    assert "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic


def test_stays_loaded_and_binds_to_itself() -> None:
    dynamic = readelf("--dynamic")
    assert re.search(r"\(FLAGS_1\).*NODELETE", dynamic)
    assert re.search(r"\(FLAGS\).*SYMBOLIC", dynamic)


def test_nothing_undefined_but_the_c_and_cpp_runtime() -> None:
    undefined = [name for binding, section, name in dynamic_symbols() if section == "UND" and binding != "WEAK"]
    foreign = [name for name in undefined if not re.search(r"@(GLIBC|GLIBCXX|CXXABI|GCC)_", name)]
    assert undefined
    assert foreign == []


def test_exports_the_c_interface_and_the_entry_points_of_tensorrt() -> None:
    headers = [ROOT / "cpp/include/mhc/mhc.h", *(ROOT / "plugins").rglob("*.h")]
    declared = {
        name for header in headers for name in re.findall(r"^MHC_API[^;(]*?\b(mhc\w+)\(", header.read_text(), re.M)
    }
    exported = {name.split("@")[0] for _, section, name in dynamic_symbols() if section != "UND"}
    assert "mhcBoundary" in declared
    assert exported == declared | TENSORRT_ENTRY_POINTS


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, from the objects that `make build` compiled."""
    pytest.importorskip("scikit_build_core", reason="built with `make build`'s environment")
    if not (ROOT / "build/dev/CMakeCache.txt").exists():
        pytest.skip("no build/dev; run `make build`")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    settings = ["--config-settings=build-dir=build/dev", "--wheel-dir", str(folder)]
    with open(ROOT / "build/.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run([*command, *settings, str(ROOT)], check=True, cwd=ROOT, timeout=600)
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.timeout(600)
def test_wheel_holds_the_package_and_one_library(wheel: Path) -> None:
    assert re.fullmatch(rf"trtllm_mhc-{re.escape(trtllm_mhc.__version__)}-py3-none-linux_x86_64\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        entry_points = archive.read(metadata.replace("METADATA", "entry_points.txt")).decode()
    assert [name for name in names if ".so" in name] == ["trtllm_mhc/libtrtllm_mhc.so"]
    assert {name.split("/")[0] for name in names} == {"trtllm_mhc", metadata.split("/")[0]}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "trtllm_mhc").rglob("*.py")}
    assert sources <= set(names)
    assert "trtllm_mhc/py.typed" in names
    assert "trtllm-mhc = trtllm_mhc.cli:main" in entry_points
    assert any(name.endswith("LICENSE") for name in names)


@pytest.mark.timeout(600)
def test_wheel_works_where_it_is_unpacked(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    # Without site-packages, where the editable installation would be found first.
    script = "import sys; sys.path.insert(0, sys.argv[1]); from trtllm_mhc import plugin; print(plugin.load()._name)"
    command = [sys.executable, "-S", "-E", "-c", script, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == (str(tmp_path / "trtllm_mhc/libtrtllm_mhc.so"), "")


def test_missing_library_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trtllm_mhc, "__path__", [str(tmp_path)])
    monkeypatch.setattr(trtllm_mhc, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(FileNotFoundError, match=rf"libtrtllm_mhc\.so.*{re.escape(str(tmp_path))}.*make build"):
        plugin.library_path()


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("fetch_tensorrt.sh", ["9.3"], "expected one of 10.6, 10.15, 11.2, headers; got '9.3'"),
        ("fetch_tensorrt.sh", ["11.2", "{tmp}", "no-such-python"], "'no-such-python' has no pip"),
        ("with_tensorrt.sh", ["9.3", "true"], "run scripts/fetch_tensorrt.sh 9.3"),
    ],
)
def test_scripts_say_what_they_expected(script: str, arguments: list[str], message: str, tmp_path: Path) -> None:
    command = [str(ROOT / "scripts" / script), *(argument.format(tmp=tmp_path) for argument in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert message in done.stderr


def test_named_include_folder_must_hold_the_headers(tmp_path: Path) -> None:
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert cmake is not None
    command = [cmake, "-S", str(ROOT), "-B", str(tmp_path / "build"), f"-DTRTLLM_MHC_TENSORRT_INCLUDE={tmp_path}"]
    command += [f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_CUDA_ARCHITECTURES=90a-real"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert re.search(rf"No NvInfer\.h in the TensorRT include\s+folder that was named:\s+{tmp_path}", done.stderr)


def test_every_source_names_its_licence() -> None:
    patterns = ["*.py", "*.sh", "*.h", "*.cuh", "*.cpp", "*.cu", "*.cmake", "*CMakeLists.txt", "Makefile", ".ci/run"]
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.stdout.split()]
    unnamed = [
        str(path.relative_to(ROOT))
        for path in paths
        if path.exists() and path.stat().st_size and "SPDX-License-Identifier: Apache-2.0" not in path.read_text()[:120]
    ]
    assert len(paths) > 20
    assert unnamed == []
