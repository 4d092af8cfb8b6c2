"""The lab: find out on your own data whether top-k training helps. `anyk --help` lists its commands."""

from importlib.util import find_spec

#: what the extra installs, by the names that are imported
PACKAGES = (
    "filelock",
    "jinja2",
    "markupsafe",
    "matplotlib",
    "packaging",
    "PIL",
    "pooch",
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
