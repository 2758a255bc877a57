"""Plain Python functions as pytrees: the arrays they close over become leaves.

A jitted consumer that closes over a function's arrays would have them compiled in as constants:
a change of values recompiles, and XLA tries to fold large ones (METHOD section 13). Tracing the
function once to a jaxpr separates the program (static) from the arrays (dynamic).
"""

import collections
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import eval_jaxpr
from jaxtyping import Array, Float

_WITH_RULES = ("custom_jvp_call", "custom_vjp_call")
# Enough for the few products that are in use at one time; a program holds no arrays of its own.
_REMEMBERED_PROGRAMS = 64
_programs: "collections.OrderedDict[int, _Program]" = collections.OrderedDict()


class _Program:
    """A jaxpr without its constants; compared by identity, so it can be static under `jit`."""

    def __init__(self, jaxpr: jex_core.Jaxpr):
        self.jaxpr = jaxpr


class ClosedFunction(eqx.Module):
    """A traced function of one flat vector: a static program, and its arrays as leaves."""

    constants: list[Any]
    program: _Program = eqx.field(static=True)

    def __call__(self, flat: Float[Array, " d"]) -> Float[Array, "..."]:
        """Evaluates the function."""
        (out,) = eval_jaxpr(self.program.jaxpr, (), *self.constants, flat)
        return out


def close(function: Callable, like: jax.ShapeDtypeStruct) -> ClosedFunction:
    """Traces a flat function and pulls all arrays out of the program.

    Programs are remembered and reused when a later trace is identical, so the same function (or a
    fresh lambda around other arrays) does not recompile a jitted consumer. The function itself is
    traced anew every time: the arrays are the ones that it closes over *now*.

    Args:
        function: Function of one array, returning one array. If it is a pytree, its array leaves
            are pulled out as well.
        like: Shape and dtype of its argument.

    Returns:
        The function as a pytree.
    """
    leaves, static = eqx.partition(function, eqx.is_array)

    # A fresh function: make_jaxpr caches on the function object and would return old arrays.
    def with_leaves(leaves, flat):
        return eqx.combine(leaves, static)(flat)

    closed = jax.make_jaxpr(with_leaves)(leaves, like)
    constants = _collect_constants(closed)
    leaves = [*map(jnp.asarray, constants.values()), *jtu.tree_leaves(leaves)]

    def hoisted(leaves, flat):
        known = dict(zip(constants, leaves, strict=False))
        own = [known[id(constant)] for constant in closed.consts]
        (product,) = _evaluate(closed.jaxpr, own, known, *leaves[len(constants) :], flat)
        return product

    # Evaluation may leave constants of its own, such as scalars that it made on the way.
    jaxpr = jax.make_jaxpr(hoisted)(leaves, like)
    return ClosedFunction([*jaxpr.consts, *leaves], _remember(_open(jaxpr)))


def _open(closed: jex_core.ClosedJaxpr) -> jex_core.Jaxpr:
    """Turns the constants of a jaxpr into its first arguments."""
    jaxpr = closed.jaxpr
    invars = [*jaxpr.constvars, *jaxpr.invars]
    debug_info = jaxpr.debug_info.with_unknown_names()
    return jaxpr.replace(constvars=[], invars=invars, debug_info=debug_info)


def _is_inner_jit(equation) -> bool:
    return equation.primitive.name in ("jit", "pjit") and "jaxpr" in equation.params


def _collect_constants(closed: jex_core.ClosedJaxpr) -> dict[int, Any]:
    """Finds the closed-over arrays, those of functions that the user jitted included, by id."""
    found = {id(constant): constant for constant in closed.consts}
    for equation in closed.jaxpr.eqns:
        if _is_inner_jit(equation):
            found |= _collect_constants(equation.params["jaxpr"])
    return found


def _evaluate(jaxpr, constants, known, *arguments):
    """Evaluates a jaxpr, inlining jitted inner functions that carry arrays of their own."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arguments], strict=True))

    def read(atom):
        return atom.val if isinstance(atom, jex_core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        inputs = list(map(read, equation.invars))
        if _is_inner_jit(equation) and _collect_constants(equation.params["jaxpr"]):
            inner = equation.params["jaxpr"]
            inner_constants = [known[id(constant)] for constant in inner.consts]
            outputs = _evaluate(inner.jaxpr, inner_constants, known, *inputs)
        else:
            outputs = _alone(jaxpr, equation, inputs)
        values |= dict(zip(equation.outvars, outputs, strict=True))
    return list(map(read, jaxpr.outvars))


def _alone(jaxpr: jex_core.Jaxpr, equation: Any, inputs: list[Any]) -> list[Any]:
    """Evaluates one equation, as a jaxpr of its own."""
    pairs = zip(equation.invars, inputs, strict=True)
    free = {atom: value for atom, value in pairs if not isinstance(atom, jex_core.Literal)}
    single = jaxpr.replace(
        constvars=[],
        invars=list(free),
        outvars=equation.outvars,
        eqns=[equation],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return eval_jaxpr(single, (), *free.values())


def _remember(jaxpr: jex_core.Jaxpr) -> _Program:
    """Returns the remembered program that is identical to `jaxpr`, or remembers this one."""
    for key, program in _programs.items():
        if _same_jaxpr(program.jaxpr, jaxpr):
            _programs.move_to_end(key)
            return program
    program = _Program(jaxpr)
    _programs[id(program)] = program
    if len(_programs) > _REMEMBERED_PROGRAMS:
        _programs.popitem(last=False)
    return program


def _same_jaxpr(a: jex_core.Jaxpr, b: jex_core.Jaxpr) -> bool:
    """Whether two jaxprs are the same program up to the names of their variables.

    Errs on the side of "different" (which costs a compilation, never a wrong result).
    """
    if a is b:
        return True
    if len(a.eqns) != len(b.eqns) or len(a.invars) != len(b.invars):
        return False
    paired: dict[Any, Any] = {}

    def bind(left, right):
        paired.update(zip(left, right, strict=False))
        return len(left) == len(right) and all(
            p.aval == q.aval for p, q in zip(left, right, strict=True)
        )

    def same_atoms(left, right):
        return len(left) == len(right) and all(map(same_atom, left, right))

    def same_atom(p, q):
        if isinstance(p, jex_core.Literal) or isinstance(q, jex_core.Literal):
            return type(p) is type(q) and p.aval == q.aval and _same_scalar(p.val, q.val)
        return paired.get(p) is q

    if not bind(a.constvars, b.constvars) or not bind(a.invars, b.invars):
        return False
    for p, q in zip(a.eqns, b.eqns, strict=True):
        same = p.primitive is q.primitive and same_atoms(p.invars, q.invars)
        compare = _same_custom if p.primitive.name in _WITH_RULES else _same_parameters
        if not same or not compare(p.params, q.params):
            return False
        if not bind(p.outvars, q.outvars):
            return False
    return same_atoms(a.outvars, b.outvars)


def _same_scalar(a: Any, b: Any) -> bool:
    # Through bytes: 0.0 and -0.0 differ, NaN equals itself.
    x, y = np.asarray(a), np.asarray(b)
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


def _same_parameters(a: Any, b: Any) -> bool:
    """Compares equation parameters; containers and jaxprs by content, the rest by `==`."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, jex_core.ClosedJaxpr):
        same_constants = len(a.consts) == len(b.consts) and all(map(_is, a.consts, b.consts))
        return same_constants and _same_jaxpr(a.jaxpr, b.jaxpr)
    if isinstance(a, jex_core.Jaxpr):
        return _same_jaxpr(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same_parameters(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_same_parameters, a, b))
    if isinstance(a, (float, np.ndarray, np.generic)):
        return _same_scalar(a, b)
    return (a == b) is True


def _same_custom(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Compares two calls of functions with their own derivative rule, such as `jax.nn.relu`.

    Every trace wraps the rule in new objects, so it is taken to be the same when its source line
    is, and when the function that it belongs to is the same program.
    """
    return a.keys() == b.keys() and all(
        _same_parameters(a[key], b[key])
        or (_source(a[key]) is not None and _source(a[key]) == _source(b[key]))
        for key in a
    )


def _source(rule: Any) -> Any:
    debug_info = getattr(rule, "debug_info", None)
    if debug_info is not None and not isinstance(rule, (jex_core.Jaxpr, jex_core.ClosedJaxpr)):
        return debug_info.func_src_info
    return getattr(rule, "__code__", None)


def _is(a: Any, b: Any) -> bool:
    return a is b
