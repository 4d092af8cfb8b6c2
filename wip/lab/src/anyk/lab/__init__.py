"""The lab: find out on your own data whether top-k training helps. `anyk --help` lists its commands."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anyk.lab.api import Report, compare
    from anyk.lab.losses import import_modules

__all__ = ["Report", "compare", "import_modules"]
_PACKAGES = ("filelock", "jinja2", "matplotlib", "PIL", "pooch", "pyarrow", "requests", "rich", "safetensors", "scipy", "tyro")
"""what the extra installs, by the names that are imported"""

if _missing := [name for name in _PACKAGES if find_spec(name) is None]:
    raise ModuleNotFoundError(f'The lab needs the packages {", ".join(_missing)}: pip install "anyk[lab]"', name=_missing[0])


def __getattr__(name: str) -> Any:
    # Only when asked for: a run, which imports a part of the lab, need not load what makes a comparison.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("anyk.lab.losses" if name == "import_modules" else "anyk.lab.api"), name)
