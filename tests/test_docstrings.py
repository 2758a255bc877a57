"""Every public name says what it takes, what shapes, what it raises, and where it comes from."""

import dataclasses
import importlib
import inspect
import pkgutil
import re

import equinox as eqx
import pytest

import pnkrylov

ROOT_MODULES = ["pnkrylov", "pnkrylov.trace", "pnkrylov.sample_diagnostics", "pnkrylov.plotting"]
FRONT_DOORS = {"pnkrylov.trace": ("trace_inverse", "logdet", "trace_function")}
BRIDGES = [f"pnkrylov.interop.{name}" for name in ("arviz", "blackjax", "scipy")]


def exported(module):
    """Public names of a module: `__all__`, or what it defines itself."""
    if module.__name__ in FRONT_DOORS:
        return FRONT_DOORS[module.__name__]
    if hasattr(module, "__all__"):
        return module.__all__
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isroutine(value) or inspect.isclass(value))
        and value.__module__ == module.__name__
    ]


def public():
    """(dotted name, object) of all functions and classes, and of the methods of the classes."""
    names = [*ROOT_MODULES, *BRIDGES]
    for found in pkgutil.iter_modules(pnkrylov.__path__, "pnkrylov."):
        if found.ispkg and not found.name.endswith("interop"):
            names.append(found.name)
    seen, everything = set(), []
    for module in map(importlib.import_module, names):
        for name in exported(module):
            value = getattr(module, name)
            if id(value) in seen or not (inspect.isroutine(value) or inspect.isclass(value)):
                continue
            seen.add(id(value))
            everything.append((f"{module.__name__}.{name}", value))
    return everything


EVERYTHING = public()
FUNCTIONS = [(name, value) for name, value in EVERYTHING if inspect.isroutine(value)]
CLASSES = [(name, value) for name, value in EVERYTHING if inspect.isclass(value)]


# Functions that compute nothing of the method: files, pictures, bridges to other packages, checks,
# and what any textbook has.
WITHOUT_SOURCE = {
    "pnkrylov.as_operator",
    "pnkrylov.load",
    "pnkrylov.gp.kernel_operator",
    "pnkrylov.gp.load",
    "pnkrylov.gp.save",
    "pnkrylov.hmc.covariance_root",
    "pnkrylov.interop.arviz.from_posterior",
    "pnkrylov.interop.arviz.from_samples",
    "pnkrylov.interop.arviz.import_arviz",
    "pnkrylov.interop.blackjax.import_metrics",
    "pnkrylov.interop.blackjax.inverse_mass_matrix",
    "pnkrylov.interop.blackjax.metric",
    "pnkrylov.interop.scipy.linear_operator",
    "pnkrylov.laplace.load",
    "pnkrylov.laplace.tune_by_validation",
    "pnkrylov.plotting.calibration",
    "pnkrylov.plotting.contraction",
    "pnkrylov.plotting.quadrature",
    "pnkrylov.plotting.reliability",
    "pnkrylov.plotting.ritz_values",
    "pnkrylov.plotting.sample_check",
    "pnkrylov.plotting.spectrum",
    "pnkrylov.plotting.two_variances",
    "pnkrylov.preconditioners.check_preconditioner",
    "pnkrylov.preconditioners.precondition",
    "pnkrylov.sample_diagnostics.check_samples",
    "pnkrylov.sample_diagnostics.mahalanobis",
}


def arguments_of(function):
    """Names of the arguments, without self and cls."""
    parameters = inspect.signature(function).parameters
    return [name for name in parameters if name not in ("self", "cls")]


def section(text, title):
    """The lines under `Title:` of a Google docstring."""
    found = re.search(rf"^{title}:\n((?:[ ]+.*\n|\n)*)", text + "\n", re.MULTILINE)
    return found.group(1) if found else ""


def methods_of(kind):
    """Public methods that the class itself defines, properties apart."""
    for name, value in vars(kind).items():
        if not name.startswith("_") and inspect.isroutine(inspect.unwrap(value)):
            yield name, getattr(kind, name)


def test_there_is_something_to_check():
    assert len(FUNCTIONS) > 50 and len(CLASSES) > 50


@pytest.mark.parametrize(("name", "value"), EVERYTHING, ids=[name for name, _ in EVERYTHING])
def test_has_a_docstring_of_its_own(name, value):
    assert (value.__doc__ or "").strip(), name
    if inspect.isclass(value):
        bare = [method for method, function in methods_of(value) if not inspect.getdoc(function)]
        assert not bare, f"{name}: methods without a docstring: {bare}"


@pytest.mark.parametrize(("name", "function"), FUNCTIONS, ids=[name for name, _ in FUNCTIONS])
def test_functions_describe_arguments_errors_and_sources(name, function):
    text = inspect.getdoc(function) or ""
    described = section(text, "Args") + section(text, "Attributes")
    missing = [
        argument
        for argument in arguments_of(function)
        if not re.search(rf"^ +\**{argument}\b", described, re.M)
    ]
    # `As in f` under Args, for all arguments at once, is a description, too.
    assert not missing or re.search(r"\b[Aa]s (in )?`", described), f"not under Args: {missing}"
    assert re.search(r"^Raises:", text, re.M), "no Raises section"
    has_source = re.search(r"^Source:", text, re.M) is not None
    assert has_source != (name in WITHOUT_SOURCE), "a source, or a reason to have none"


@pytest.mark.parametrize(("name", "function"), FUNCTIONS, ids=[name for name, _ in FUNCTIONS])
def test_arrays_have_shapes(name, function):
    """What is an array in the annotations has axes in them, or in words."""
    text = inspect.getdoc(function) or ""
    hints = str(inspect.signature(function))
    if "Array" in hints and not re.search(r"(Float|Int|Bool|UInt32|Key)\[", hints):
        words = r"`\([^)]*,|`\(\)`|scalar|shape|vector|matrix|[Aa]s (in )?`"
        assert re.search(words, text), name


@pytest.mark.parametrize(("name", "kind"), CLASSES, ids=[name for name, _ in CLASSES])
def test_classes_describe_their_fields(name, kind):
    """Fields of results under Attributes, or as arguments of the constructor."""
    if not issubclass(kind, eqx.Module) or inspect.isabstract(kind):
        return
    fields = [field.name for field in dataclasses.fields(kind) if field.name[0] != "_"]
    text = "\n".join(
        inspect.getdoc(part) or "" for part in (kind, vars(kind).get("__init__")) if part
    )
    missing = [field for field in fields if not re.search(rf"\b{field}\b", text)]
    assert not missing, f"{name}: fields without a word: {missing}"
