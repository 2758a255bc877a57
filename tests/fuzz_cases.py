"""Bad input: what is wrong with an argument, and the calls that must refuse it.

A `Target` is one public callable with arguments that are right, and for each argument a list of
`Bad` values, most of them shared by all arguments of one kind (an operator, a vector, a count...).
Every pair is a case: the call with this one argument replaced. The targets are in
`fuzz_cases_<part>.py`; tests/test_fuzz.py runs them, scripts/tables_bad_input.py prints them.
"""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from harness import no_type_checker
from pnkrylov.errors import PnkrylovError

D = 6  # size of every problem: structural errors cost nothing, few programs are compiled
STRUCTURAL = (TypeError, ValueError)
RUN_TIME = (PnkrylovError,)
MISSING = object()  # stands for an argument that is left out


@dataclasses.dataclass(frozen=True)
class Bad:
    """One way in which an argument is wrong."""

    what: str  # for the table: "has 5 entries"
    make: Callable[[Any], Any]  # the right value -> the wrong one
    errors: tuple[type[Exception], ...] = STRUCTURAL
    # Other words for the argument, where the message is about a pair of arguments.
    names: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Case:
    """A call that must be refused."""

    target: "Target"
    argument: str
    bad: Bad

    @property
    def title(self) -> str:
        return f"{self.argument} {self.bad.what}"


@dataclasses.dataclass(frozen=True)
class Target:
    """A public callable, arguments that it takes, and what is wrong with each of them."""

    name: str  # as users write it: "pnkrylov.solve", "pnkrylov.SolveBelief.sample"
    function: Callable[..., Any]
    right: Callable[[Any], dict[str, Any]]  # dtype -> arguments
    bad: dict[str, list[Bad]]
    docstring: str | None = None  # where it is not that of the function

    def text(self) -> str:
        """What the documentation shows of the callable."""
        if self.docstring is not None:
            return self.docstring
        own = self.function.__dict__.get("__init__") if inspect.isclass(self.function) else None
        return f"{inspect.getdoc(self.function)}\n{inspect.getdoc(own) if own else ''}"

    def cases(self) -> list[Case]:
        return [Case(self, argument, bad) for argument, found in self.bad.items() for bad in found]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a call did: the error it raised, or what it returned."""

    error: Exception | None
    value: Any = None

    def sentence(self) -> str:
        """Kind and first sentence of the message, for the table."""
        if self.error is None:
            return f"returned {self.value!r}"
        if isinstance(self.error, OSError):
            return f"{type(self.error).__name__}: {self.error.strerror}."
        text = " ".join(str(self.error).split())
        first = re.split(r"(?<=[.;])\s(?=[A-Z(])", text, maxsplit=1)[0]
        return f"{type(self.error).__name__}: {first}"


def run(case: Case, dtype: Any) -> Outcome:
    """Makes the call as a user without a run-time type checker would."""
    arguments = dict(case.target.right(dtype))
    value = case.bad.make(arguments.get(case.argument))
    arguments[case.argument] = value
    if value is MISSING:
        del arguments[case.argument]
    try:
        with no_type_checker():
            return Outcome(None, case.target.function(**arguments))
    except Exception as error:  # whatever it is: judged by the caller
        return Outcome(error)


def complaint(case: Case, outcome: Outcome) -> str | None:
    """What is wrong with the answer to a bad call; None if it is as documented."""
    if outcome.error is None:
        return f"{case.title}: accepted, returned {outcome.value!r:.200}"
    if isinstance(outcome.error, FloatingPointError) and jax.config.jax_debug_nans:
        return None  # JAX stops at the first NaN, before we can name it
    kind = type(outcome.error).__name__
    message = str(outcome.error)
    if not isinstance(outcome.error, case.bad.errors):
        return f"{case.title}: {kind} is no {[e.__name__ for e in case.bad.errors]}: {message:.300}"
    names = (case.argument, *case.bad.names)
    if not any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", message) for name in names):
        return f"{case.title}: the {kind} names none of {names}: {message:.300}"
    return None


def documented(target: Target, error: Exception) -> bool:
    """Whether the docstring promises this kind of error, or a base class of it."""
    if isinstance(error, FloatingPointError) and jax.config.jax_debug_nans:
        return True
    kinds = [kind.__name__ for kind in type(error).__mro__ if issubclass(kind, Exception)][:-1]
    if isinstance(error, OSError):
        kinds.append("FileNotFoundError")
    return any(re.search(rf"\b{kind}\b", target.text()) for kind in kinds)


def method(
    owner: type,
    name: str,
    build: Callable[[Any], Any],
    arguments: Callable[[Any], dict[str, Any]],
    bad: dict[str, list[Bad]],
) -> Target:
    """A method, `name` its path for users, of an object that is built when it is needed."""
    attribute = name.split(" ")[0].rsplit(".", 1)[1]

    def call(owned: Any, **options: Any) -> Any:
        return getattr(owned, attribute)(**options)

    # A method that overrides another keeps its promises.
    parts = [inspect.getdoc(kind.__dict__.get(attribute)) or "" for kind in owner.__mro__]
    text = "\n".join(part for part in parts if part)
    return Target(name, call, lambda dtype: {"owned": build(dtype), **arguments(dtype)}, bad, text)


def constant(build: Callable) -> Callable:
    """Caches what `build` returns, also where it is first asked for while a stand-in is traced."""

    @functools.cache
    def made(*arguments: Any) -> Any:
        # Evaluated like this, JAX stops at its own NaN, for indices out of range.
        with jax.ensure_compile_time_eval(), jax.debug_nans(False):
            return build(*arguments)

    return functools.wraps(build)(lambda *arguments: made(*arguments))


def stand_in(build: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What `build` returns, with ones for its numbers: made by tracing alone, nothing is compiled.

    Enough wherever the arguments are refused before a number is looked at.
    """

    def fill(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        whole = jnp.issubdtype(leaf.dtype, jnp.integer)
        return jnp.asarray(np.full(leaf.shape, 0 if whole else 1, leaf.dtype))

    return functools.cache(
        lambda dtype: jax.tree.map(fill, eqx.filter_eval_shape(lambda: build(dtype)))
    )


# Values, by the kind of the argument.


def always(value: Any) -> Callable[[Any], Any]:
    return lambda right: value


def array(function: Callable[[np.ndarray], Any]) -> Callable[[Any], Any]:
    return lambda right: function(np.array(right))


def other_precision(right: Any) -> Any:
    return np.asarray(right).astype(np.float16)


NOT_NUMBERS = [
    Bad("has dtype int32", array(lambda a: a.astype(np.int32))),
    Bad("is complex", array(lambda a: a.astype(np.complex64))),
    Bad("is boolean", array(lambda a: a > 0)),
]
OBJECTS = [
    Bad("is an array of Python objects", array(lambda a: a.astype(object))),
    Bad("is a string", always("matrix")),
]
MATRIX = [
    Bad("is not square", array(lambda a: a[:, :-1])),
    Bad("is a vector", array(lambda a: a[0])),
    Bad("has three axes", array(lambda a: a[None])),
    Bad("is empty", array(lambda a: a[:0, :0])),
    *NOT_NUMBERS,
    Bad("is half precision", other_precision),
    *OBJECTS,
]
OPERATOR = [
    *MATRIX,
    Bad("is missing", always(None)),
    Bad("is a list of lists", array(lambda a: a.tolist())),
]
VECTOR = [
    Bad("is too short", array(lambda a: a[:-1])),
    Bad("is too long", array(lambda a: np.concatenate([a, a[:1]]))),
    Bad("is a column", array(lambda a: a[:, None])),
    Bad("is empty", array(lambda a: a[:0])),
    *NOT_NUMBERS,
    *OBJECTS,
    Bad("is a dictionary", lambda right: {"a": np.array(right)}),
]
# Functions that take several right-hand sides take a matrix.
ROWS = [
    Bad("has rows that are too short", array(lambda a: a[:, :-1])),
    Bad("is a vector", array(lambda a: a[0])),
    Bad("has three axes", array(lambda a: a[None])),
    *NOT_NUMBERS,
]
KEY = [
    Bad("is missing", always(None)),
    Bad("is a seed", always(0)),
    Bad("is a string", always("key")),
    Bad("is a vector of numbers", always(np.zeros(3, np.float32))),
]
OPTIONAL_KEY = KEY[1:]
NOT_AN_INT = [
    Bad("is True", always(True)),
    Bad("is 2.5", always(2.5)),
    Bad("is a string", always("3")),
]
COUNT = [Bad("is -1", always(-1)), *NOT_AN_INT]
POSITIVE_COUNT = [Bad("is 0", always(0)), *COUNT]
REQUIRED_COUNT = [*POSITIVE_COUNT, Bad("is missing", always(None))]
STEPS = [*POSITIVE_COUNT, Bad("is more than d", always(D + 1))]
CHOICE = [Bad("is unknown", always("nonsense")), Bad("is a number", always(3))]
NOT_A_NUMBER = [
    Bad("is a string", always("1")),
    Bad("is complex", always(1j)),
    Bad("is a vector", always(np.ones(2, np.float32))),
]
SCALAR = [*NOT_A_NUMBER, Bad("is None", always(None))]
TOLERANCE = [
    Bad("is 0", always(0.0)),
    Bad("is -1", always(-1.0)),
    Bad("is NaN", always(float("nan"))),
    Bad("is a string", always("1e-3")),
    Bad("is complex", always(1j)),
]
FRACTION = [
    Bad("is 0", always(0.0)),
    Bad("is 1", always(1.0)),
    Bad("is -0.5", always(-0.5)),
    Bad("is NaN", always(float("nan"))),
    Bad("is a string", always("0.95")),
]
FUNCTION = [Bad("is None", always(None)), Bad("is a number", always(3.0))]
PRECONDITIONER = [
    Bad("is a matrix", always(np.eye(D, dtype=np.float32))),
    Bad("is a string", always("nystrom")),
]
SECONDS = [
    Bad("is -1", always(-1.0)),
    Bad("is NaN", always(float("nan"))),
    Bad("is a string", always("1 s")),
]


def with_errors(bads: list[Bad], *errors: type[Exception]) -> list[Bad]:
    return [dataclasses.replace(bad, errors=errors) for bad in bads]


def with_names(bads: list[Bad], *names: str) -> list[Bad]:
    """The same, where messages may call the argument something else."""
    return [dataclasses.replace(bad, names=(*bad.names, *names)) for bad in bads]


def without(bads: list[Bad], *whats: str) -> list[Bad]:
    """Those that this argument does not refuse, because they are right here, left out."""
    unknown = set(whats) - {bad.what for bad in bads}
    assert not unknown, unknown
    return [bad for bad in bads if bad.what not in whats]


# What the right arguments are made of.


@functools.cache
def matrix(dtype: Any) -> np.ndarray:
    rng = np.random.default_rng(0)
    root = rng.standard_normal((D, D))
    return (root @ root.T + D * np.eye(D)).astype(np.dtype(dtype))


@constant
def vector(dtype: Any, seed: int = 1) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(D), dtype)


def rows(dtype: Any, count: int = 3) -> jax.Array:
    return jnp.stack([vector(dtype, seed) for seed in range(1, count + 1)])


def random_key() -> jax.Array:
    return jax.random.key(0)
