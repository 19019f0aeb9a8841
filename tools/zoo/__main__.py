"""python -m tools.zoo [PART OF A NAME]: all kinds, or those whose name has this part. Exit code 1 if anything is wrong."""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path

from tools.zoo.kinds import kinds
from tools.zoo.tour import report, visit


def main(part: str = "") -> int:
    """Visit the kinds and print the report."""
    logging.disable()
    visits = []
    with tempfile.TemporaryDirectory() as folder:
        for number, kind in enumerate(kinds()):
            if part in kind.name:
                place = Path(folder, str(number))
                place.mkdir()
                visits.append(visit(kind, place))
    sys.stdout.write(report(visits) + "\n")
    return 1 if any(visit.wrong for visit in visits) else 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:2]))
