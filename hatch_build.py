"""Builds the native library with the package, where there is a C compiler: src/anyk/kernels/build.py does it and says how."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags


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
        # It needs the machine and the system, but not one version of Python. Which manylinux that is, auditwheel finds.
        platform = next(tag for tag in platform_tags() if not tag.startswith(("manylinux", "musllinux")))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        build_data["force_include"][str(library)] = f"anyk/kernels/{library.name}"
