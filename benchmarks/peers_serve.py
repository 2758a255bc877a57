"""The peer's side of `side_by_side.Peer`: rows are called one at a time, over stdin and stdout."""

import json
import sys
import time
from importlib import metadata

import numpy as np
import torch


def serve(rows, packages):
    """Answers every line with the seconds that the row took.

    Args:
        rows: name -> function of the arguments in the line. What it returns is sent back: a
            number, or, where the line asks for a file, a dictionary of arrays.
        packages: whose versions are told at the beginning.
    """
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries may print

    def answer(message):
        print(json.dumps(message), file=answers, flush=True)

    answer({name: metadata.version(name) for name in (*packages, "torch")})
    for line in sys.stdin:
        asked = json.loads(line)
        started = time.perf_counter()
        made = rows[asked["row"]](*asked["arguments"])
        seconds = time.perf_counter() - started
        if "into" in asked:
            np.savez(asked["into"], **{name: to_numpy(array) for name, array in made.items()})
        number = made if isinstance(made, float) else None
        answer({"seconds": seconds, "value": number})


def to_numpy(array):
    return array.detach().numpy() if isinstance(array, torch.Tensor) else np.asarray(array)
