"""Result codes of a run: what went wrong, and the remedy. Failure is data until it is thrown."""

import equinox as eqx


class RESULTS(eqx.Enumeration):
    """Outcome of `solve` and `inverse`: compare `belief.result` with `RESULTS.successful`."""

    successful = ""
    nonfinite_input = (
        "The right-hand side or start vector contains NaN or infinity. Check the data that it is "
        "computed from."
    )
    nonfinite_product = (
        "A product A v contains NaN or infinity. Check the data behind the operator; if it "
        "overflows, scale it or use float64."
    )
    not_symmetric = (
        "The operator is not symmetric: x.Ay and y.Ax differ by more than rounding for two random "
        "vectors. Pass (A + A.T)/2 or correct the product; check_symmetric=False skips the probe."
    )
    not_positive_definite = (
        "The operator is not positive definite: a Ritz value is not positive beyond rounding. Add "
        "a multiple of the identity (shift=..., noise variance, damping, prior precision), or "
        "check the sign and the curvature that defines the operator."
    )
    bad_lower_bound = (
        "lower_bound is not a lower bound of the spectrum: it must be positive (shift included) "
        "and at most the smallest Ritz value. Pass a smaller one, or none."
    )
