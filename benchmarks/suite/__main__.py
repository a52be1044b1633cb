"""Memory, FLOPs and time of a step by several methods; writes docs/performance.md and its plots.

A run that was interrupted is taken up where it ended. ``--quick`` tries everything on small models
and writes its report into ``.cache`` instead.
"""

from __future__ import annotations

import argparse
import sys

from ..common import RESULTS, ROOT, Screen
from .cases import SETS
from .report import write_report
from .run import Runner
from .store import Store

CACHE = ROOT / ".cache" / "suite"


def main() -> int:
    options = parse()
    screen = Screen()
    quick = options.set == "quick"
    results = (CACHE if quick else RESULTS) / "suite.json"
    pages = CACHE if quick else ROOT / "docs"
    if not options.report:
        begun = Store(CACHE / f"{' '.join([options.set, options.only]).strip()}.json")
        if options.restart:
            begun.clear()
        Runner(screen, begun, options.limit_gib * 2**30).run(SETS[options.set]().only(options.only))
        begun.merge_into(results)
    written, met = write_report(Store(results).records, pages, screen)
    screen.say(f"written: {', '.join(str(path.relative_to(ROOT)) for path in written)}")
    return 0 if met else 1


def parse() -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    size = options.add_mutually_exclusive_group()
    for name, plan in SETS.items():
        size.add_argument(
            f"--{name}", dest="set", action="store_const", const=name, help=plan.__doc__
        )
    options.set_defaults(set="default")
    options.add_argument("--only", default="", help="what has this in its name: 'llama', 'race'")
    options.add_argument("--restart", action="store_true", help="forget an interrupted run")
    options.add_argument("--report", action="store_true", help="measure nothing, write the report")
    options.add_argument(
        "--limit-gib", type=float, default=8.0, help="leave out what is expected to need more"
    )
    return options.parse_args()


if __name__ == "__main__":
    sys.exit(main())
