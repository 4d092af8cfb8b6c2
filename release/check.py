"""What a release must pass, of what can be tried on one machine: `make release-check`.

python release/check.py [dist]    the folder with the sdist, the wheel with the native library and the pure wheel

Nothing is uploaded or downloaded: the empty environments get their torch by links to the one here. It says what it looked at,
and ends with 1 if something is wrong.
"""

import email
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
SCHEMAS = {
    "citation-file-format": "CITATION.cff",
    "github-workflows": ".github/workflows/*.yml",
    "github-issue-forms": ".github/ISSUE_TEMPLATE/[!c]*.yml",
    "github-issue-config": ".github/ISSUE_TEMPLATE/config.yml",
}
"""of check-jsonschema, and what they are for"""
# The places of this checkout and this environment must not leak into the ones that are made here.
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "ANYK", "CC"))}


class Wrong(Exception):
    """Something that a release must not have."""


def run(*command: object, **environment: str) -> str:
    done = subprocess.run([*map(str, command)], cwd=ROOT, env=CLEAN | environment, capture_output=True, text=True)
    if done.returncode:
        raise Wrong((done.stdout + done.stderr).strip())
    return done.stdout.strip()


# The files


def version() -> str:
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "src/anyk/__init__.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert found
    return found[1]


def artifacts(dist: Path) -> tuple[Path, Path, Path]:
    """The sdist, the wheel with the library, and the pure wheel; nothing else may be there."""
    here = version()
    patterns = (r"\.tar\.gz", r"-py3-none-(manylinux|macosx)[\w.]+\.whl", r"-py3-none-any\.whl")
    names = sorted(file.name for file in dist.iterdir())
    found = [[name for name in names if re.fullmatch(f"anyk-{re.escape(here)}{pattern}", name)] for pattern in patterns]
    if [len(each) for each in found] != [1, 1, 1] or len(names) != 3:
        there = ", ".join(names) or "nothing"
        raise Wrong(f"expected one sdist, one platform wheel and one pure wheel of {here}, found {there}")
    sdist, platform, pure = (dist / name for (name,) in found)
    return sdist, platform, pure


def same_version_everywhere() -> str:
    """The version, and the day, are the same in CITATION.cff and in the first heading of the changelog that is released."""
    here = version()
    newest = re.search(r"^## (?!Unreleased)(.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    cited = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    told = [re.search(rf'^{key}: "?(.+?)"?$', cited, re.MULTILINE) for key in ("version", "date-released")]
    expected = f"{here} ({told[1][1] if told[1] else 'no date'})"
    if newest is None or newest[1] != expected or told[0] is None or told[0][1] != here:
        raise Wrong(
            f"src/anyk/__init__.py has {here}, CITATION.cff {told[0] and told[0][1]}, and CHANGELOG.md begins with"
            f" {newest and newest[1]!r} instead of {expected!r}"
        )
    return expected


def fit_their_schemas() -> str:
    files = []
    for schema, pattern in SCHEMAS.items():
        files += (some := sorted(ROOT.glob(pattern)))
        if not some:
            raise Wrong(f"there is no {pattern}")
        run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *some)
    return ", ".join(file.name for file in files)


# README


class Places(HTMLParser):
    """Where the links and images of a page lead, and what in it can be led to."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.links: list[str | None] = []
        self.images: list[str | None] = []
        self.ids: set[str | None] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids.add(given.get("id"))
        if tag == "a":
            self.links.append(given.get("href"))
        elif tag == "img":
            self.images.append(given.get("src"))


def broken(page: str) -> list[str]:
    """The links and images of a page that lead nowhere when it stands on a package index."""
    places, found = Places(page), []
    for kind, some in (("link", places.links), ("image", places.images)):
        for place in some:
            if place is None:
                found.append(f"{kind} without a place: an index removes all but http, https and mailto, data: too")
            elif place.startswith("#"):
                found += [] if place[1:] in places.ids else [f"{kind} to {place}, which no heading has"]
            elif not place.startswith(("https://", "http://", "mailto:")):
                found.append(f"{kind} to {place}, which is relative")
    return found


def readme_works_on_an_index(wheel: Path) -> str:
    """README as the wheel brings it, through the renderer of the package index."""
    from readme_renderer import markdown

    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        about = email.message_from_bytes(archive.read(name))
    is_markdown = about["Description-Content-Type"] == "text/markdown"
    page = markdown.render(about.get_payload(decode=True).decode()) if is_markdown else None
    if not page:
        raise Wrong("the wheel has no README in Markdown")
    if lines := broken(page):
        raise Wrong("\n".join(lines))
    places = Places(page)
    told = f"{len(places.links)} links, {len(places.images)} images"
    if any(line.startswith("Source,") for line in about.get_all("Project-URL") or ()):
        return told
    return f"{told}; those to files of the repository are left out: pyproject.toml has no Source among its urls"


# Installations


def needed_by(distribution: importlib.metadata.Distribution) -> Iterator[importlib.metadata.Distribution]:
    """What is installed here of what a distribution depends on, and so on."""
    seen, waiting = set(), [distribution]
    while waiting:
        for requirement in map(Requirement, waiting.pop().requires or ()):
            name = canonicalize_name(requirement.name)
            if name not in seen and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
                seen.add(name)
                waiting.append(importlib.metadata.distribution(name))
                yield waiting[-1]


def link(site: Path, distributions: list[importlib.metadata.Distribution]) -> None:
    """Makes what is installed here importable from another environment of the same Python."""
    for distribution in distributions:
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(str(distribution.locate_file(top)))


def empty_environment(place: Path, package: Path, **environment: str) -> Path:
    """The commands of an environment with the package, what it depends on, and nothing else. Nothing is downloaded."""
    venv.create(place, with_pip=False, symlinks=True)
    python = place / "bin" / "python"
    (site,) = place.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps"]
    if package.suffix == ".gz":  # its wheel is built in there
        backend = importlib.metadata.distribution("hatchling")
        link(site, [backend, *needed_by(backend)])
        pip.append("--no-build-isolation")
    run(*pip, package, **environment)
    (own,) = importlib.metadata.distributions(name="anyk", path=[str(site)])
    link(site, list(needed_by(own)))
    return place / "bin"


def works(package: Path, kernels: str, *, compiler: bool) -> str:
    """Installs into an empty environment and runs smoke.py there."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "nothing").mkdir()
        environment = {} if compiler else {"PATH": str(Path(folder) / "nothing")}
        commands = empty_environment(Path(folder) / "venv", package, **environment)
        return run(commands / "python", "-W", "error", ROOT / "release" / "smoke.py", kernels, **environment)


def main() -> int:
    dist = Path(sys.argv[1] if len(sys.argv) > 1 else "dist").resolve()
    try:
        sdist, platform, pure = artifacts(dist)
    except (Wrong, OSError) as error:
        print(f"WRONG  {dist}: {error}")
        return 1
    checks = {
        "version and day": same_version_everywhere,
        "schemas": fit_their_schemas,
        "twine check": lambda: run(sys.executable, "-m", "twine", "check", "--strict", sdist, platform, pure) and "passed",
        "README on an index": lambda: readme_works_on_an_index(pure),
        "pure wheel, no compiler": lambda: works(pure, "plain", compiler=False),
        "platform wheel, no compiler": lambda: works(platform, "native", compiler=False),
        "sdist, no compiler": lambda: works(sdist, "plain", compiler=False),
        "sdist, with a compiler": lambda: works(sdist, "native", compiler=True),
    }
    wrong = 0
    for name, check in checks.items():
        try:
            print(f"ok     {name}: {check()}", flush=True)
        except Wrong as error:
            wrong += 1
            print(f"WRONG  {name}: " + str(error).replace("\n", "\n         "), flush=True)
    print(f"{len(checks) - wrong} of {len(checks)} passed. Nothing was uploaded.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
