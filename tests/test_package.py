"""What is in the wheel and the sdist, and what they say about themselves."""

import email
import importlib
import importlib.util
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import octavo

ROOT = Path(__file__).parent.parent
NAME = f"octavo-{octavo.__version__}"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("hatchling") is None, reason="no hatchling: pip install -e '.[dev]'"
)


def build(folder: Path, out: Path, *targets: str) -> None:
    """By the build backend itself: in this environment, so nothing is fetched."""
    flags = [word for target in targets for word in ("-t", target)]
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(out), *flags]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    build(ROOT, out, "wheel", "sdist")
    return out


@pytest.fixture(scope="module")
def wheel(dist):
    with zipfile.ZipFile(dist / f"{NAME}-py3-none-any.whl") as archive:
        yield archive


def sources() -> set[str]:
    files = (path for path in (ROOT / "octavo").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in files}


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = {name for name in wheel.namelist() if not name.startswith(f"{NAME}.dist-info/")}
    assert names == sources()
    assert "octavo/py.typed" in names


def test_the_wheel_brings_its_licence(wheel):
    for name in ("LICENSE", "NOTICE"):
        assert wheel.read(f"{NAME}.dist-info/licenses/{name}") == (ROOT / name).read_bytes()


def test_metadata(wheel):
    said = email.message_from_bytes(wheel.read(f"{NAME}.dist-info/METADATA"))
    assert said["Version"] == octavo.__version__
    assert said["Requires-Python"] == ">=3.10"
    assert [need.partition(">")[0] for need in said.get_all("Requires-Dist") if "extra ==" not in need] == ["torch"]
    versions = {f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 15)}
    assert versions <= set(said.get_all("Classifier"))


def test_the_console_script_is_there(wheel):
    lines = wheel.read(f"{NAME}.dist-info/entry_points.txt").decode().split("\n")
    module, function = next(line for line in lines if line.startswith("octavo = ")).removeprefix("octavo = ").split(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_the_sdist_builds_the_same_wheel(dist, wheel, tmp_path):
    with tarfile.open(dist / f"{NAME}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    build(tmp_path / NAME, tmp_path / "dist", "wheel")
    with zipfile.ZipFile(tmp_path / "dist" / f"{NAME}-py3-none-any.whl") as again:
        assert {i.filename: i.CRC for i in again.infolist()} == {i.filename: i.CRC for i in wheel.infolist()}


def test_the_sdist_can_be_tested_and_documented(dist):
    with tarfile.open(dist / f"{NAME}.tar.gz") as archive:
        names = {name.removeprefix(f"{NAME}/") for name in archive.getnames()}
    assert {
        "mkdocs.yml",
        "tests/conftest.py",
        "docs/index.md",
        "examples/octavo.ipynb",
        "benchmarks/README.md",
    } <= names
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]
