"""A virtual environment for each package, on top of the project's own.

The packages ask for versions of the same libraries that exclude each other. What seqsplit itself
needs, torch above all, is shared: a folder of links to it, which a path file names. Nothing else of
the project's environment is seen, or a package would find libraries that do not go together.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from .packages import describe

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "outside"
SHARED = CACHE / "shared"
INSTALLED = Path(sysconfig.get_paths()["purelib"])


def python_of(package: str) -> Path:
    """The interpreter of a package's environment."""
    return CACHE / package / "venv" / "bin" / "python"


def set_up(package: str) -> str:
    """Make a package's environment where there is none. Returns why it cannot be used, or ''."""
    verdict = CACHE / package / "environment.txt"  # empty where all is well
    if not verdict.exists():
        _create(package)
        verdict.write_text(_install(package) or _import(package))
    return verdict.read_text()


def _create(package: str) -> None:
    folder = CACHE / package / "venv"
    venv.create(folder, clear=True, with_pip=True)
    _link_shared()
    own = Path(sysconfig.get_paths(vars={"base": str(folder)})["purelib"])
    # Not the bare path: the path files in the folder count too, seqsplit's among them.
    (own / "shared.pth").write_text(f"import site; site.addsitedir({str(SHARED)!r})\n")


def _link_shared() -> None:
    SHARED.mkdir(parents=True, exist_ok=True)
    for distribution in _needed_by("seqsplit"):
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (SHARED / top).is_symlink():
                (SHARED / top).symlink_to(INSTALLED / top)


def _needed_by(name: str) -> list[importlib.metadata.Distribution]:
    """A distribution of the project's environment and all that it requires, without extras."""
    found: dict[str, importlib.metadata.Distribution] = {}
    names = [name]
    while names:
        name = names.pop()
        # By its folder: in the repository's root, seqsplit's own sources would be found first.
        here = next(importlib.metadata.distributions(name=name, path=[str(INSTALLED)]), None)
        if here is not None and name not in found:
            found[name] = here
            required = [line for line in here.requires or () if "extra ==" not in line]
            names += [re.match(r"[\w.-]+", line).group() for line in required]
    return list(found.values())


def _install(package: str) -> str:
    described = describe(package)
    torch = f"torch=={importlib.metadata.version('torch')}"
    command = [python_of(package), "-m", "pip", "install", "--quiet", torch]
    for extra in (described.REQUIREMENTS, getattr(described, "WITHOUT_DEPENDENCIES", ())):
        flags = ["--no-deps"] if extra is not described.REQUIREMENTS else []
        done = subprocess.run([*command, *flags, *extra], capture_output=True, text=True)
        if done.returncode:
            return "cannot be installed: " + _last_error(done.stderr)
    return ""


def _import(package: str) -> str:
    names = describe(package).IMPORTS
    command = [python_of(package), "-c", f"import seqsplit, {names}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=CACHE)
    return "cannot be imported: " + _last_error(done.stderr) if done.returncode else ""


def version_of(package: str) -> str:
    """The installed version, '' if there is none."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    python = python_of(package)
    if not python.exists():
        return ""
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()


def _last_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    return (errors or lines or [f"no message ({sys.platform})"])[-1][:300]
