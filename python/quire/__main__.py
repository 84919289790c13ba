"""`python -m quire`: the program `quire`."""

from __future__ import annotations

import os
import signal
import sys

from quire import _quire
from quire.settings import KERNELS


def main() -> int:
    """Runs the program with the arguments of this process."""
    # Python's handler would only note Ctrl-C, and run once the program has ended. Where a shell ignores it, it stays ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if KERNELS.is_dir():
        os.environ.setdefault("QUIRE_KERNELS_DIR", str(KERNELS))
    return _quire.main(["quire", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
