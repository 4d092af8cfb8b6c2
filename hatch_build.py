"""What hatchling does for anyk: the native library, where there is a C compiler, and README as a package index shows it.

src/anyk/kernels/build.py builds the library and says how.
"""

import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface
from packaging.tags import mac_platforms, platform_tags

CODE = r"```(?s:.*?)```|`[^`]*`"
LINK = r"(!?)\[((?:[^][]|\[[^][]*\])*)\]\((?![a-z]+:|#)([^)\s]+)\)"  # the mark of an image, the words, the place
TAG = r"""<img\b[^>]*?\bsrc="(?![a-z]+:)([^"]+)"[^>]*>"""


class NativeLibrary(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        place = Path(self.root, "src", "anyk", "kernels", "build.py")
        spec = importlib.util.spec_from_file_location("anyk_kernels_build", place)
        build = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = build
        spec.loader.exec_module(build)
        library = build.build_if_possible()
        if library is None or version == "editable":  # which uses the library where it was built
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag()}"
        build_data["force_include"][str(library)] = f"anyk/kernels/{library.name}"


class IndexReadme(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        source = metadata.get("urls", {}).get("Source", "")
        metadata["readme"] = {"content-type": "text/markdown", "text": for_index(text, source, metadata["version"])}


def platform_tag() -> str:
    """The machine and the system, but not one version of Python. Which manylinux that is, auditwheel finds."""
    oldest = os.environ.get("MACOSX_DEPLOYMENT_TARGET")
    if sys.platform == "darwin" and oldest:  # what the compiler builds for; else the system that it runs on
        major, _, minor = oldest.partition(".")
        return next(mac_platforms((int(major), int(minor or 0))))
    return next(tag for tag in platform_tags() if not tag.startswith(("manylinux", "musllinux")))


def for_index(text: str, source: str, version: str) -> str:
    """README where the files beside it are not: links go to the code host; without one, pictures and links are left out."""

    def elsewhere(found: re.Match[str]) -> str:
        whole, (mark, words, place, picture) = found[0], found.groups()
        if picture:
            return whole.replace(f'"{picture}"', f'"{source}/raw/v{version}/{picture}"') if source else ""
        if not place:  # code
            return whole
        if not source:
            return "" if mark else words
        return f"{mark}[{words}]({source}/{'raw' if mark else 'blob'}/v{version}/{place})"

    source = source.rstrip("/")
    for _ in range(2):  # a picture may be the words of a link
        text = re.sub(f"{CODE}|{LINK}|{TAG}", elsewhere, text)
    return text
