"""Write docs/pays.md and its figures from the summaries in the repository, and what other pages quote of it.

    python evidence/pays/write.py          # or: make evidence

Nothing is trained here and no data are needed. What has no runs is shown as missing. In README.md and the guide, what stands
between ``<!-- pays: NAME -->`` and ``<!-- end -->`` is written too.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pays.kept import SUMMARIES
from pays.page import Evidence, page, pages

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--summaries", type=Path, default=SUMMARIES)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pays.md")
    arguments = parser.parse_args()
    evidence = Evidence(arguments.summaries)
    arguments.out.write_text(page(evidence, arguments.out.parent / "images"), encoding="utf-8")
    if arguments.summaries == SUMMARIES:
        for path, text in pages(ROOT, evidence).items():
            if text != path.read_text(encoding="utf-8"):
                path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
