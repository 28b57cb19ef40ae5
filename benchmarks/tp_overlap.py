"""`dynaflow bench` as a script: `python -m benchmarks.tp_overlap --cases 8b-2x4096`."""

from __future__ import annotations

import argparse
import sys

from dynaflow_train.benchmarks import command

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    command.add_arguments(parser)
    sys.exit(command.run(parser.parse_args(), sys.argv[1:], print))
