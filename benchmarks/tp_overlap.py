"""`dynaflow bench` under its old name: `python -m benchmarks.tp_overlap --cases 8b-2x4096`."""

from __future__ import annotations

import sys

from dynaflow_train.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
