"""Is a solve belief calibrated? Predicted against actual error, and coverage, over a grid.

Spectra x right-hand sides x steps x sizes, for `scale="lookahead"` (the default) and
`scale="prior"` (the papers'). Writes results/calibration.json; docs/calibration.md shows it.
"""

import argparse
import pathlib
import sys

import jax
from record import save

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
from calibration_grid import grid, summary


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[300, 2000])
    parser.add_argument("--seeds", type=int, nargs="+", default=[4, 1], help="one per size")
    parser.add_argument("--name", default="calibration", help="name of the result file")
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    seeds = dict(zip(arguments.sizes, arguments.seeds, strict=True))
    records = grid(seeds)
    for line in summary(records):
        print(line)
    print(save(arguments.name, {"records": records}))


if __name__ == "__main__":
    main()
