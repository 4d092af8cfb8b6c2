"""The helpers beside this file (made.py, lab_data.py, …) can be imported by tests in any folder below."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
