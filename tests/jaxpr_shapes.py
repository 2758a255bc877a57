"""What a program allocates, read off its jaxpr."""

import jax.extend


def all_shapes(jaxpr):
    """Shapes of everything that a program computes, in loops and other inner programs too."""
    for equation in jaxpr.eqns:
        yield from (variable.aval.shape for variable in equation.outvars)
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from all_shapes(inner)
