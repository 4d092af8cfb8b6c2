"""pytest, with every call inside anyk held to its annotations: shapes by jaxtyping, types by beartype.

python tests/checked.py WHAT_PYTEST_TAKES
"""

import sys

import jaxtyping
import pytest
from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a float, as for mypy

if __name__ == "__main__":
    jaxtyping.install_import_hook("anyk", "checked.check")
    # pytest would have liked to import jaxtyping first.
    sys.exit(pytest.main(["-W", "ignore:Module already imported", *sys.argv[1:]]))
