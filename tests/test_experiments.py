"""The methods of benchmarks/experiments against dense formulas, in 60 dimensions."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pnkrylov as pk

EXPERIMENTS = pathlib.Path(__file__).parents[1] / "benchmarks" / "experiments"
sys.path.insert(0, str(EXPERIMENTS))

import baselines  # noqa: E402
import fashion_network  # noqa: E402
import full_ggn  # noqa: E402
import methods  # noqa: E402
import prototypes  # noqa: E402
import scores  # noqa: E402

SIZE, CLASSES, SHIFT, KEY = 60, 4, 0.7, jax.random.key(3)
# Steps of the run: 12 and the look-ahead.
LEVEL, STEPS = 12, 12 + methods.LOOKAHEAD
pytestmark = pytest.mark.skipif(
    not jax.config.jax_enable_x64, reason="the experiments run with 64-bit floats"
)


def close(actual, expected, tolerance=1e-9):
    largest = np.abs(expected).max()
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance * largest)


@pytest.fixture(scope="module")
def rows():
    """Square-root rows of a GGN with a decaying spectrum, rank 45 of 60."""
    rng = np.random.default_rng(0)
    rotation = np.linalg.qr(rng.standard_normal((SIZE, SIZE)))[0][:45]
    return np.geomspace(10, 0.1, 45)[:, None] * rotation


@pytest.fixture(scope="module")
def jacobians():
    return np.random.default_rng(1).standard_normal((6, CLASSES, SIZE))


@pytest.fixture(scope="module")
def run(rows):
    return methods.KrylovRun(jnp.asarray(rows.T @ rows), KEY, STEPS)


def dense(approximation):
    """The covariance as a matrix, by the covariances of all coordinates."""
    return methods.covariances([approximation], [np.eye(SIZE)[None]])[0][0]


def test_chunks_and_shared_rows_change_nothing(rows, jacobians):
    gram = baselines.GramForm(rows)
    found = [gram.exact(SHIFT), gram.eigen_shift(7, SHIFT), baselines.diagonal(rows[0] ** 2, SHIFT)]
    whole = methods.covariances(found, [jacobians])
    parts = methods.covariances(found, [jacobians[:4], jacobians[4:]])
    for one, other, approximation in zip(whole, parts, found, strict=True):
        close(one, other)
        close(one, jacobians @ dense(approximation) @ jacobians.transpose(0, 2, 1))
    variances = 1 / (rows[0] ** 2 + SHIFT)
    close(whole[2], (jacobians * variances) @ jacobians.transpose(0, 2, 1))


def test_exact_forms_are_the_inverse(rows):
    matrix = rows.T @ rows
    expected = np.linalg.inv(matrix + SHIFT * np.eye(SIZE))
    for form in (baselines.GramForm(rows), baselines.DenseForm(matrix, SIZE)):
        close(dense(form.exact(SHIFT)), expected)
        close(form.solve(np.eye(SIZE), SHIFT), expected)
        close(form.mv(np.eye(SIZE)), matrix)


def test_leading_eigenpairs(rows):
    matrix = rows.T @ rows
    values, vectors = np.linalg.eigh(matrix)
    inverse = np.linalg.inv(matrix + SHIFT * np.eye(SIZE))
    leading = vectors[:, -9:]
    rest = np.eye(SIZE) - leading @ leading.T
    inside = (leading / (values[-9:] + SHIFT)) @ leading.T
    for form in (baselines.GramForm(rows), baselines.DenseForm(matrix, 20)):
        close(dense(form.eigen_shift(9, SHIFT)), inside + rest / SHIFT, 1e-6)
        matched = dense(form.eigen_matched(9, SHIFT))
        others = (np.trace(inverse) - np.trace(inside)) / (SIZE - 9)
        close(matched - inside, rest * others, 1e-6)


def test_beginnings_of_one_run_are_what_inverse_gives(rows, run):
    operator = jnp.asarray(rows.T @ rows)
    options = {"key": KEY, "num_steps": LEVEL, "shift": SHIFT}
    for layout, make, stored in (
        ("paper", methods.sigma_m, LEVEL + 1),
        ("resolve-all", methods.ours, STEPS),
    ):
        belief = pk.inverse(operator, layout=layout, **options)
        found = make(run, LEVEL, SHIFT)
        close(dense(found), np.asarray(belief.covariance.push(jnp.eye(SIZE))), 1e-8)
        assert found.products == int(belief.stats.num_matvecs) - 2  # less the check of symmetry
        assert found.stored == stored


@pytest.mark.slow
def test_a_budget_is_split_as_inverse_splits_it(rows):
    operator = jnp.asarray(rows.T @ rows)
    run = methods.KrylovRun(operator, KEY, SIZE - 5)
    options = {"budget": 40, "num_probes": 1, "shift": SHIFT, "check_symmetric": False}
    belief = pk.inverse(operator, key=KEY, **options)
    found = methods.ours_budget(run, 40, SHIFT, num_probes=1)
    close(dense(found), np.asarray(belief.covariance.push(jnp.eye(SIZE))), 1e-8)
    assert found.products == 40 == int(belief.stats.num_matvecs)


def test_krylov_shift(rows, run):
    basis = run.rows[:15]
    matrix = rows.T @ rows + SHIFT * np.eye(SIZE)
    rest = (np.eye(SIZE) - basis.T @ basis) / SHIFT
    expected = basis.T @ np.linalg.inv(basis @ matrix @ basis.T) @ basis + rest
    close(dense(methods.krylov_shift(run, 15, SHIFT)), expected)


def test_ablations_of_sigma_m(rows, run):
    """What is resolved stays; the bulk is 1/lambda, or the coupling is gone."""
    basis, following = run.rows[:LEVEL], run.rows[LEVEL]
    matrix = rows.T @ rows + SHIFT * np.eye(SIZE)
    outside = np.eye(SIZE) - basis.T @ basis
    resolved = basis.T @ run.inverse(LEVEL, SHIFT) @ basis
    uncoupled = methods.sigma_m_uncoupled(run, LEVEL, SHIFT)
    close(dense(uncoupled) - resolved, uncoupled.rest * outside)
    whole, prior = (
        make(run, LEVEL, SHIFT) for make in (methods.sigma_m, methods.sigma_m_prior_bulk)
    )
    # q_perp is the part of A^-1 q_{m+1} outside of the basis, up to its length.
    u = outside @ np.linalg.solve(matrix, following)
    u /= np.linalg.norm(u)
    change = dense(prior) - dense(whole)
    close(change, (1 / SHIFT - whole.rest) * (outside - np.outer(u, u)), 1e-4)


def test_a_run_from_all_eigenvectors_alike_measures_its_bulk():
    """Then stochastic Lanczos quadrature has no error by chance: the bulk is that of the trace."""
    rng = np.random.default_rng(4)
    vectors = np.linalg.qr(rng.standard_normal((SIZE, SIZE)))[0]
    matrix = (vectors * np.geomspace(0.01, 10, SIZE)) @ vectors.T
    start = jnp.asarray(vectors.sum(axis=1))
    basis = pk.lanczos(jnp.asarray(matrix), start, STEPS)
    run = methods.KrylovRun(jnp.asarray(matrix), KEY, STEPS, basis=basis)
    trace = np.trace(np.linalg.inv(matrix + SHIFT * np.eye(SIZE)))
    expected = (trace - np.trace(run.inverse(20, SHIFT))) / (SIZE - 20)
    close(prototypes.own_bulk(run, 20, SHIFT), expected, 1e-3)
    found = prototypes.ours_without_probes(run, 20, SHIFT)
    assert found.products == found.stored == 20


def test_the_bulk_along_directions_is_theirs(rows, run, monkeypatch):
    """Against the dense complement; probes stop when a step changes them by 0.2 %."""
    monkeypatch.setattr(prototypes, "ALONG_DEPTH", 12)
    matrix = rows.T @ rows + SHIFT * np.eye(SIZE)
    direction = (rows[2:14].sum(axis=0) + 0.1 * rows[30:].sum(axis=0))[None]
    found = prototypes.ours_along(run, 22, SHIFT, direction)
    basis = run.rows[:10]
    complement = np.linalg.svd(basis)[2][10:]
    inside = complement @ direction[0]
    solved = np.linalg.solve(complement @ matrix @ complement.T, inside)
    close(found.rest, inside @ solved / (inside @ inside), 0.02)
    assert found.products == 22 and 10 <= found.stored < 22


def test_subspaces(rows, jacobians):
    matrix = rows.T @ rows
    precision = matrix + SHIFT * np.eye(SIZE)
    flat = jacobians.reshape(-1, SIZE)
    surrogate = 1 / (np.diag(matrix) + SHIFT)
    found = baselines.projection_directions(flat * surrogate, flat, 9)
    close(found @ found.T, np.eye(9))
    projected = baselines.projected_curvature(found, lambda block: block @ matrix)
    _, vectors = np.linalg.eigh((flat * surrogate) @ flat.T)
    for count in (5, 9):
        span = (surrogate[:, None] * flat.T) @ vectors[:, -count:]
        expected = span @ np.linalg.solve(span.T @ precision @ span, span.T)
        made = baselines.subspace("lowrank", found, projected, count, SHIFT)
        close(dense(made), expected)
        shifted = baselines.subspace("lowrank", found, projected, count, SHIFT, rest=1 / SHIFT)
        orthonormal = np.linalg.qr(span)[0]
        rest = np.eye(SIZE) - orthonormal @ orthonormal.T
        close(dense(shifted), expected + rest / SHIFT)


def test_largest_parameters(rows):
    matrix = rows.T @ rows
    flat = np.random.default_rng(2).standard_normal(SIZE)
    index = baselines.largest_parameters(flat, 7)
    assert np.abs(flat[index]).min() >= np.abs(np.delete(flat, index)).max()
    entries = baselines.GramForm(rows).entries(index)
    made = baselines.subspace("magnitude", index, entries, 7, SHIFT)
    inverse = np.linalg.inv(matrix[np.ix_(index, index)] + SHIFT * np.eye(7))
    close(dense(made)[np.ix_(index, index)], inverse)
    assert not dense(made)[np.delete(np.arange(SIZE), index)].any()


def test_swag():
    snapshots = np.random.default_rng(3).standard_normal((5, SIZE)) + 2
    sample = np.cov(snapshots.T)
    expected = (sample + np.diag(np.diag(sample)) * 4 / 5) / 2
    close(dense(baselines.swag(snapshots)), expected)


def test_scores_of_gaussians():
    covariance = np.stack([np.diag([1.0, 2.0]), np.diag([3.0, 0.5])])
    found = scores.fidelity(covariance, 2 * covariance)
    # KL(N(0, S) || N(0, 2 S)) = K (1/2 - 1 + log 2) / 2
    close(found["kl"], 0.5 - 1 + np.log(2))
    close(found["log_trace"], np.log(2 * 6.5))
    logits = np.array([[2.0, 0.0], [0.0, 1.0]])
    scaled = logits / np.sqrt(1 + np.pi / 8 * np.array([[1.0, 2.0], [3.0, 0.5]]))
    expected = np.exp(scaled) / np.exp(scaled).sum(axis=1, keepdims=True)
    close(scores.probit(logits, covariance), expected)


def test_the_networks_size_is_the_papers():
    params = jax.eval_shape(fashion_network.initial, KEY)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 11_878


def test_the_full_ggn_is_accumulated_over_interruptions(tmp_path, monkeypatch):
    monkeypatch.setattr(full_ggn, "SMALL", 2)
    monkeypatch.setattr(full_ggn, "LARGE", 4)
    params = fashion_network.initial(KEY, channels=(1, 2), hidden=3, classes=3, side=4)
    images = np.random.default_rng(5).random((12, 4, 4, 1)).astype(np.float32)
    flat, unravel = jax.flatten_util.ravel_pytree(params)
    outputs = jax.jit(lambda flat: fashion_network.apply(unravel(flat), images))
    jacobian = np.asarray(jax.jit(jax.jacrev(outputs))(flat), np.float64)
    probabilities = np.asarray(jax.nn.softmax(outputs(flat)), np.float64)
    hessian = np.eye(3) * probabilities[:, None] - np.einsum(
        "ni,nj->nij", probabilities, probabilities
    )
    expected = np.einsum("nip,nij,njq->pq", jacobian, hessian, jacobian)

    class Interrupted(Exception):
        pass

    original, calls = full_ggn.root_rows, []

    def root_rows(*arguments):
        calls.append(arguments)
        if len(calls) == 4:
            raise Interrupted
        return original(*arguments)

    monkeypatch.setattr(full_ggn, "root_rows", root_rows)
    with pytest.raises(Interrupted):
        full_ggn.accumulate(params, images, tmp_path, save_every=1)
    close(full_ggn.accumulate(params, images, tmp_path, save_every=1), expected, 1e-5)
    # Two batches of the first four images, one and a half lost, four of the rest; none again.
    assert len(calls) == 4 + 4
    close(full_ggn.accumulate(params, images, tmp_path), expected, 1e-5)
    assert len(calls) == 8


def test_a_run_from_given_directions_is_what_inverse_gives(rows):
    """Its parts over the basis make up the covariance of the library's own call."""
    jacobian = np.random.default_rng(4).standard_normal((20, SIZE))
    directions = methods.principal_directions(jacobian, 6)
    leading = np.linalg.svd(jacobian)[2][:6]
    close(np.abs(np.sum(directions * leading, axis=1)), np.ones(6))
    operator = pk.as_operator(jnp.asarray(rows.T @ rows))
    total = 4 * methods.FROM_BLOCKS + methods.PROBE_DEPTH
    found = methods.ours_from(operator, KEY, directions, total, SHIFT)
    options = {"num_steps": 3, "lookahead": 1, "num_probes": 1, "probe_depth": 20}
    belief = pk.inverse(
        operator, key=KEY, shift=SHIFT, block_size=4, start=directions[:4],
        check_symmetric=False, **options,
    )  # fmt: skip
    close(dense(found), np.asarray(belief.covariance.as_matrix()))
    assert found.products == int(belief.stats.num_matvecs) <= total
