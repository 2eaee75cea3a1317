"""What is installed by pip: the three libraries, complete, and nothing that they do not need."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
LIBRARIES = ("spectral", "manifold_muon", "sel_jax")
# Neither environments nor what earlier builds left, of which setuptools would make new wheels.
ELSEWHERE = shutil.ignore_patterns(".*", "runs", "build", "dist", "*.egg-info", "__pycache__")
USE = """
import jax, optax, manifold_muon, sel_jax, spectral

params = {"w": jax.random.normal(jax.random.key(0), (6, 4))}
manifolds = {"w": manifold_muon.Stiefel()}
params = manifold_muon.project_params(params, manifolds)
optimizer = manifold_muon.manifold_muon(0.1, manifolds, adam_learning_rate=0.1)
updates, _ = optimizer.update({"w": params["w"] ** 2}, optimizer.init(params), params)
assert abs(spectral.spectral_norm(optax.apply_updates(params, updates)["w"]) - 1) < 1e-4
sel_jax.fold(sel_jax.reparametrize(params, "w"))
print(*(module.__file__ for module in (spectral, manifold_muon, sel_jax)), sep="\\n")
"""


def build(what: str, source: Path) -> Path:
    """The path of what setuptools makes of a source tree, here and without a network."""
    program = f"import sys; from setuptools.build_meta import *; print(build_{what}(sys.argv[1]))"
    command = [sys.executable, "-c", program, str(source.parent)]
    result = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return source.parent / result.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("sdist") / "source"
    shutil.copytree(ROOT, source, ignore=ELSEWHERE)
    return build("sdist", source)


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the sdist, as `python -m build` makes it."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return build("wheel", folder / sdist.name.removesuffix(".tar.gz"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel in it, and of this environment what the wheel requires."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    (info,) = folder.glob("*.dist-info")
    for found in requirements(PathDistribution(info)).values():
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            (folder / top).symlink_to(Path(str(found.locate_file(top))))
    return folder


def requirements(of: Distribution) -> dict[str, Distribution]:
    """Name -> distribution of all that one requires without extras, and of what these require."""
    found: dict[str, Distribution] = {}
    waiting = [of]
    while waiting:
        for requirement in map(Requirement, waiting.pop().requires or ()):
            wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if wanted and requirement.name not in found:
                found[requirement.name] = distribution(requirement.name)
                waiting.append(found[requirement.name])
    return found


def run(installed: Path, program: str) -> subprocess.CompletedProcess[str]:
    """The program under a Python that sees its own library and this folder."""
    seen = f"import sys; sys.path.append({str(installed)!r})\n"
    command = [sys.executable, "-I", "-S", "-c", seen + program]
    return subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)


def modules() -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for library in LIBRARIES
        for path in (ROOT / library).rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }


def test_the_wheel_has_the_libraries_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (licence,) = (name for name in archive.namelist() if name.endswith("/licenses/LICENSE"))
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
    assert names == modules()
    assert {f"{library}/py.typed" for library in LIBRARIES} <= names


def test_the_wheel_requires_little(installed: Path) -> None:
    (info,) = installed.glob("weight_geometry-*.dist-info")
    required = map(Requirement, PathDistribution(info).requires or ())
    always = {requirement.name for requirement in required if requirement.marker is None}
    assert always == {"jax", "jaxtyping", "numpy", "optax"}


def test_the_sdist_has_what_the_wheel_is_made_of(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert modules() | {"LICENSE", "README.md", "CHANGELOG.md", "setup.cfg", "pyproject.toml"} <= names
    assert not {name for name in names if name.split("/")[0] in ("experiments", "tests")}


def test_the_libraries_run_on_what_the_wheel_requires(installed: Path) -> None:
    result = run(installed, USE)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [str(installed / library / "__init__.py") for library in LIBRARIES]


@pytest.mark.parametrize("package", ["chex", "equinox", "flax", "matplotlib", "orbax", "pytest"])
def test_other_packages_are_out_of_sight(installed: Path, package: str) -> None:
    """Or the test above would be in vain."""
    assert f"No module named '{package}'" in run(installed, f"import {package}").stderr


@pytest.mark.parametrize("module", ["spectral.linen", "spectral.nnx", "sel_jax.linen", "sel_jax.nnx"])
def test_without_flax_its_wrappers_say_what_is_missing(installed: Path, module: str) -> None:
    assert "ModuleNotFoundError: No module named 'flax'" in run(installed, f"import {module}").stderr
