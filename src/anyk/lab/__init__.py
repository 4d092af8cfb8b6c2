"""The lab: find out on your own data whether top-k training helps. `anyk --help` lists its commands."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anyk.lab.comparison.compare import Report, compare
    from anyk.lab.run.loss_names import import_modules

__all__ = ["Report", "compare", "import_modules"]

#: what the extra installs, by the names that are imported
PACKAGES = (
    "filelock",
    "jinja2",
    "matplotlib",
    "packaging",
    "PIL",
    "pooch",
    "pyarrow",
    "requests",
    "rich",
    "safetensors",
    "scipy",
    "tyro",
)

_missing = [name for name in PACKAGES if find_spec(name) is None]
if _missing:
    _which = f"package {_missing[0]}" if len(_missing) == 1 else f"packages {', '.join(_missing[:-1])} and {_missing[-1]}"
    raise ModuleNotFoundError(f'The lab needs the {_which}: pip install "anyk[lab]"', name=_missing[0])


def __getattr__(name: str) -> Any:
    # Only when asked for: a run, which imports a part of the lab, need not load what makes a comparison.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place = "anyk.lab.run.loss_names" if name == "import_modules" else "anyk.lab.comparison.compare"
    return getattr(import_module(place), name)
