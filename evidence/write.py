"""Write docs/results.md, docs/results-tables.md and their figures from the summaries in the repository.

    python evidence/write.py          # or: make evidence

Nothing is trained here and no data are needed. A cell without runs is shown as missing, a claim without its runs as not
measured.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import results_page
import study
import tables_page
from claims import Evidence

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--summaries", type=Path, default=study.SUMMARIES)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results.md")
    arguments = parser.parse_args()
    evidence = Evidence(arguments.summaries)
    arguments.out.write_text(results_page.page(evidence, arguments.out.parent / "images"))
    arguments.out.with_name("results-tables.md").write_text(tables_page.page(evidence))


if __name__ == "__main__":
    main()
