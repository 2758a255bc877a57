"""Every bad preconditioner is refused by name, with the value and a remedy."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harness import no_type_checker
from pnkrylov.errors import NotFiniteError, NotPositiveDefiniteError, NotSymmetricError
from pnkrylov.operators import as_operator
from pnkrylov.preconditioners import (
    BlockDiagonal,
    Dense,
    Diagonal,
    LowRank,
    Preconditioner,
    ScaledIdentity,
    check_preconditioner,
    choose_observations,
    fully_linear,
    nystrom,
    one_observation,
    operator_diagonal,
    pivoted_cholesky,
    precondition,
    randomly_pivoted_cholesky,
    sub_sampled,
)

KEY = jax.random.key(3)


class Broken(Preconditioner):
    """A user's preconditioner whose root is NaN: an indefinite diagonal."""

    entries: jax.Array
    num_products: int = eqx.field(static=True, default=0)

    @property
    def size(self):
        return self.entries.shape[0]

    @property
    def dtype(self):
        return self.entries.dtype

    def power_mv(self, vectors, exponent):
        return vectors * self.entries**exponent

    def logdet(self):
        return jnp.sum(jnp.log(self.entries))

    def inv_diagonal(self):
        return 1 / self.entries


_F = np.float32
_EYE = jnp.eye(3, dtype=jnp.float32)
_ONES = jnp.ones(3, jnp.float32)
_INDEFINITE = jnp.asarray(np.diag(_F([1, 2, -1])))
_NAN = _ONES.at[1].set(jnp.nan)
BAD_VALUES = {
    "alpha zero": (lambda: LowRank(_EYE, 0.0), r"alpha must be positive, got 0.0.*damping"),
    "alpha negative": (lambda: LowRank(_EYE, -1.0), r"alpha must be positive, got -1.0"),
    "alpha zero, linear": (lambda: fully_linear(_ONES, 0.0), r"alpha must be positive, got 0.0"),
    "scale zero": (lambda: ScaledIdentity(3, 0.0), r"scale must be positive, got 0.0"),
    "diagonal": (lambda: Diagonal(_ONES.at[2].set(-4)), r"entries must.*entry 2 is -4.0"),
    "estimate": (lambda: Diagonal.of(_INDEFINITE), r"diagonal of A must.*entry 2 is -1.0.*floor="),
    "dense": (lambda: Dense(_INDEFINITE), r"eigenvalues of matrix must.*entry 0 is -1"),
    "dense, singular": (lambda: Dense(_EYE.at[0, 0].set(0)), r"positive beyond rounding"),
    "pivots": (lambda: pivoted_cholesky(_INDEFINITE, 2), r"pivots of A - damping I must not"),
    "damping": (lambda: pivoted_cholesky(_EYE, 2, damping=1.5), r"Pass a damping below"),
    "random pivots": (lambda: randomly_pivoted_cholesky(_INDEFINITE, 2, KEY), r"pivots of A"),
    "Nystrom": (lambda: nystrom(_INDEFINITE, 3, KEY), r"A - damping I must be positive semi"),
    "Nystrom, damping": (lambda: nystrom(_EYE, 2, KEY, damping=2.0), r"Pass a damping below"),
    "Hessian": (
        lambda: one_observation(_EYE, _INDEFINITE, scale=1.0, alpha=1.0),
        r"eigenvalues of hessians must not be negative; entry 0 is -1",
    ),
    "weight": (
        lambda: sub_sampled(_EYE[None], _EYE[None], weights=0 * _ONES[:1], alpha=1.0),
        r"weights must be positive; entry 0 is 0.0",
    ),
    "scores": (lambda: choose_observations(-_ONES, 2, KEY), r"scores must not be neg.* 0 is -1.0"),
    "few scores": (
        lambda: choose_observations(_ONES.at[0].set(0), 3, KEY),
        r"At least count=3 scores must be positive, got 2",
    ),
    "factor": (
        lambda: one_observation(_EYE, _EYE, scale=0.0, alpha=1.0),
        r"scale must be positive, got 0.0",
    ),
}
NOT_FINITE = {
    "rows": (lambda: LowRank(_NAN[None, :], 1.0), "rows contains NaN"),
    "alpha": (lambda: LowRank(_EYE, jnp.inf), "alpha contains NaN or infinity"),
    "entries": (lambda: Diagonal(_NAN), "entries contains NaN"),
    "matrix": (lambda: Dense(_EYE.at[0, 0].set(jnp.nan)), "matrix contains NaN"),
    "gradient": (lambda: fully_linear(_NAN, 1.0), "gradient contains NaN"),
    "user's own": (
        lambda: check_preconditioner(Broken(-_ONES), 3, np.dtype(_F)),
        r"preconditioner Broken is singular, indefinite or holds NaN",
    ),
    "user's own, singular": (
        lambda: check_preconditioner(Broken(_ONES.at[0].set(0)), 3, np.dtype(_F)),
        r"preconditioner Broken is singular, indefinite or holds NaN",
    ),
}
BAD_STRUCTURE = {
    "size": (
        lambda: precondition(as_operator(_EYE), Diagonal(jnp.ones(4, jnp.float32))),
        r"Diagonal has size 4, but the operator acts on vectors of length 3",
    ),
    "rows": (lambda: LowRank(_ONES, 1.0), r"rows must be a matrix \(k, d\), got shape \(3,\)"),
    "alpha": (lambda: LowRank(_EYE, _ONES), r"alpha has shape \(3,\)"),
    "entries": (lambda: Diagonal(_EYE), r"entries must be a vector \(d,\), got shape \(3, 3\)"),
    "matrix": (lambda: Dense(_EYE[:2]), r"matrix must be square"),
    "gradient": (lambda: fully_linear(_EYE, 1.0), r"gradient must be a vector"),
    "no blocks": (lambda: BlockDiagonal([]), r"blocks is empty"),
    "lengths": (
        lambda: BlockDiagonal([Diagonal(_ONES)], [jnp.arange(2)]),
        r"indices has the lengths \[2\], but the blocks the sizes \[3\]",
    ),
    "no partition": (
        lambda: BlockDiagonal([Diagonal(_ONES)], [jnp.asarray([0, 1, 1])]),
        r"indices must contain each of 0\.\.2 once",
    ),
    "rank": (lambda: pivoted_cholesky(_EYE, 4), r"rank=4 must lie between 1 and the dimension d=3"),
    "rank zero": (lambda: nystrom(_EYE, 0, KEY), r"rank=0 must lie between 1"),
    "diagonal": (lambda: pivoted_cholesky(_EYE, 1, diagonal=_ONES[:2]), r"expected \(3,\)"),
    "key": (lambda: operator_diagonal(lambda v: v, like=_ONES, num_probes=2), r"key is needed"),
    "probes": (
        lambda: operator_diagonal(lambda v: v, like=_ONES, num_probes=1, key=KEY),
        r"num_probes=1 gives no standard error",
    ),
    "sample": (
        lambda: sub_sampled(_EYE[None], _EYE[None], num_data=0, alpha=1.0),
        r"num_data=0 is smaller than the 1 sampled",
    ),
    "which weights": (
        lambda: sub_sampled(_EYE[None], _EYE[None], alpha=1.0),
        r"either num_data \(a uniform sample\) or weights",
    ),
    "weights": (
        lambda: sub_sampled(_EYE[None], _EYE[None], weights=_ONES, alpha=1.0),
        r"weights has shape \(3,\), but 1 observations",
    ),
    "count": (lambda: choose_observations(_ONES, 4, KEY), r"count=4 must lie between 1 and the 3"),
    "curvature": (
        lambda: sub_sampled(_EYE[None], _EYE[None, :2], num_data=9, alpha=1.0),
        r"which do not agree",
    ),
}


@pytest.mark.parametrize("case", BAD_VALUES)
def test_bad_values_are_refused(case):
    make, message = BAD_VALUES[case]
    with pytest.raises(NotPositiveDefiniteError, match=f"(?s){message}"):
        make()


@pytest.mark.parametrize("case", NOT_FINITE)
def test_nan_and_infinity_are_refused(case):
    make, message = NOT_FINITE[case]
    with pytest.raises(NotFiniteError, match=message):
        make()


@pytest.mark.parametrize("case", BAD_STRUCTURE)
def test_bad_structure_is_refused(case):
    make, message = BAD_STRUCTURE[case]
    with no_type_checker(), pytest.raises(ValueError, match=message):
        make()


def test_other_refusals():
    with pytest.raises(NotSymmetricError, match=r"matrix differs from its transpose by 0.5"):
        Dense(_EYE.at[0, 1].set(0.5))
    with no_type_checker():
        with pytest.raises(TypeError, match=r"preconditioner is of type float"):
            precondition(as_operator(_EYE), 2.0)
        with pytest.raises(TypeError, match=r"alpha='much' must be a real number"):
            LowRank(_EYE, "much")
    half = ScaledIdentity(3, dtype=jnp.float16)
    with pytest.raises(TypeError, match=r"has dtype float16, but the operator has dtype float32"):
        check_preconditioner(half, 3, jnp.dtype(jnp.float32))
    with pytest.raises(TypeError, match=r"dtypes \['float16', 'float32'\]"):
        BlockDiagonal([half, Diagonal(_ONES)])


def test_refusals_inside_jit():
    @eqx.filter_jit
    def apply(rows, alpha):
        return LowRank(rows, alpha).inv_mv(rows[0])

    assert np.all(np.isfinite(apply(_EYE, jnp.asarray(1.0, _F))))
    with pytest.raises(RuntimeError, match="alpha must be positive"):
        apply(_EYE, jnp.asarray(0.0, _F))

    @eqx.filter_jit
    def factor(matrix):
        return pivoted_cholesky(matrix, 2).vectors, nystrom(matrix, 3, KEY).vectors

    with pytest.raises(RuntimeError, match="must"):
        factor(_INDEFINITE)
