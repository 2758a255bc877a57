"""Errors that depend on run-time values; every message names the value and the remedy.

Structural mistakes (shapes, dtypes, missing arguments) are found while tracing and are ordinary
`ValueError` and `TypeError`. What can only be seen in numbers is one of the classes below.
"""


class PnkrylovError(RuntimeError):
    """Raised when the numbers of a run contradict what the method assumes.

    The base class: catch it to catch every run-time failure of this library.
    """


class NotPositiveDefiniteError(PnkrylovError):
    """Raised when a Ritz value or a Schur complement is not positive beyond rounding.

    A Ritz value lies between the extreme eigenvalues, so a non-positive one *proves* that the
    operator is not positive definite.
    """

    @staticmethod
    def message(ritz_value: object) -> str:
        """Returns the message for the offending Ritz value."""
        return (
            "The operator is not positive definite: a Lanczos run found the Ritz value "
            f"{ritz_value}, and all lie between the smallest and the largest eigenvalue. Add a "
            "multiple of the identity that lifts the spectrum above zero (noise variance, damping, "
            "prior precision), or check the sign and the curvature that defines the operator."
        )


class NotFiniteError(PnkrylovError):
    """Raised when the right-hand side or a product `A v` contains NaN or infinity."""

    @staticmethod
    def message(name: str) -> str:
        """Returns the message for the argument or product called `name`."""
        return (
            f"{name} contains NaN or infinity. Check the data that it is computed from; if it "
            "overflows, scale the operator or use float64 "
            "(jax.config.update('jax_enable_x64', True))."
        )


class NotSymmetricError(PnkrylovError):
    """Raised when two random vectors have `x.Ay != y.Ax` beyond rounding (`check_symmetric`)."""

    @staticmethod
    def message(asymmetry: object, tolerance: object) -> str:
        """Returns the message for the measured asymmetry and the tolerance it exceeded."""
        return (
            "The operator is not symmetric: for two random vectors, |x.Ay - y.Ax| is "
            f"{asymmetry} of the mean of ||Ax|| and ||Ay||; rounding explains at most {tolerance}. "
            "Pass (A + A.T)/2, or correct the product; if the asymmetry is only noise of a "
            "product in low precision, pass check_symmetric=False."
        )
