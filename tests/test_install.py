"""An editable install is found wherever Python is started."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_the_package_is_found_from_the_folder_above_a_clone(tmp_path):
    pytest.importorskip("setuptools", "70.1", reason="it builds the installation as pip does")
    clone, site = tmp_path / "jaxdt", tmp_path / "site"
    for package in ("jaxdt", "planner"):
        (clone / package).mkdir(parents=True)
        (clone / package / "__init__.py").touch()
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, clone)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    build = f"from setuptools.build_meta import build_editable; print(build_editable({str(tmp_path)!r}))"
    made = subprocess.run(
        [sys.executable, "-c", build], cwd=clone, env=environment, capture_output=True, text=True, check=True
    )
    zipfile.ZipFile(tmp_path / made.stdout.splitlines()[-1]).extractall(site)
    found = f"import site; site.addsitedir({str(site)!r}); import jaxdt, planner; print(jaxdt.__file__)"
    there = subprocess.run(
        [sys.executable, "-S", "-c", found], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert there.stdout.strip() == str(clone / "jaxdt" / "__init__.py")
