"""What the two loops that take steps, compiled and on the host, can do."""

import jax


def check_loop(
    driver: str, *, concrete: bool, local: bool, progress: bool, limited: bool, kept: bool
) -> None:
    """Refuses a driver that cannot do what is asked for.

    Args:
        driver: what the user asked for.
        concrete: whether nothing is being traced.
        local: whether all vectors are in one process.
        progress: whether a progress bar is wanted.
        limited: whether a time limit is in force.
        kept: whether there is a checkpoint.

    Raises:
        ValueError: `driver` is unknown or cannot run here.
    """
    if driver not in ("auto", "compiled", "host"):
        raise ValueError(f"driver={driver!r} is unknown: use 'auto', 'compiled' or 'host'.")
    if not concrete and (driver == "host" or progress or limited or kept):
        raise ValueError(
            "driver='host' and progress=True need concrete values, and so do max_seconds= and "
            "checkpoint=: call the run outside jit/vmap/grad, or use driver='compiled' there."
        )
    if driver == "compiled" and (limited or kept):
        raise ValueError(
            "driver='compiled' is one XLA loop, which neither watches the time nor writes files: "
            "leave driver='auto', or drop max_seconds= and checkpoint=."
        )
    if not local and (limited or kept):
        raise ValueError(
            "max_seconds= and checkpoint= need all vectors in one process, but v is spread over "
            f"{jax.process_count()}: their clocks and disks differ. Stop by num_steps."
        )
