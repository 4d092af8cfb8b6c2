"""Make the runs of the second study: see ``plan.py`` for what is asked.

    python evidence/pays/run.py --data embeddings=FOLDER items=FILE pixels=FILE.npz --runs RUNS --jobs 2
    python evidence/pays/run.py --data embeddings=FOLDER --runs RUNS --only main q3 --on embeddings
    python evidence/pays/run.py status

A run that has ended is found by its folder and not made again: the command may be stopped or killed at any moment and started
again. What the repository keeps is written after every run (``evidence/summaries/pays-*``, see ``kept.py``). The main table is
made in waves, each on every set before the next, then the questions: ``--only main:1`` makes the first wave alone. Without a
place for its data, a set is left out.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pays.runner import main

if __name__ == "__main__":
    main(__doc__)
