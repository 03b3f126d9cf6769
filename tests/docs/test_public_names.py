"""Every public name: a doc string, an example that runs, a word on each parameter."""

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap

import pytest

import pyro_sde

OF_PYRO = {"validate_args"}  # every distribution has it, with one meaning
NOTHING = ("None", "NoReturn", "Iterator[None]")  # the last is that of a context manager
OF_TORCH = {"extra_repr"}  # every module has it, with one meaning


def public_modules():
    """What can be imported by one dot, and the module of a backend, with its former name."""
    names = [m.name for m in pkgutil.iter_modules(pyro_sde.__path__) if m.name[0] != "_"]
    names.remove("simulation")  # its classes are chosen, never named by a user
    names += ["interop.torchsde", "solvers.torchsde"]
    return ["pyro_sde", *(f"pyro_sde.{name}" for name in names)]


def public_names():
    found = {}
    for module in public_modules():
        public = importlib.import_module(module)
        assert public.__doc__, f"{module} has no doc string"
        for name in public.__all__:
            value = getattr(public, name)
            if inspect.isclass(value) or inspect.isroutine(value):
                found.setdefault(id(value), (f"{module}.{name}", value))
    return dict(found.values())


def public_functions():
    """The functions among the public names, and the methods of public classes, inherited ones too,
    if this package defines them. Properties and methods with two underscores are left out."""
    found = {}
    for name, value in public_names().items():
        if not inspect.isclass(value):
            found[name] = value
            continue
        for cls in (c for c in value.__mro__ if c.__module__.startswith("pyro_sde.")):
            for key in vars(cls):
                method = getattr(cls, key)
                if key[0] != "_" and key not in OF_TORCH and inspect.isroutine(method):
                    found[f"{cls.__module__}.{cls.__name__}.{key}"] = method
    return found


NAMES = public_names()
FUNCTIONS = public_functions()
ALL = pytest.mark.parametrize("value", NAMES.values(), ids=NAMES)


def described_fields(cls):
    """The fields of a NamedTuple or dataclass that a doc string follows."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    return {
        field.target.id
        for field, after in zip(body.body, body.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
    }


def test_the_names_are_found():
    assert {"pyro_sde.AutoSDE", "pyro_sde.nn.SDEBlock", "pyro_sde.plotting.plot_band"} < set(NAMES)
    assert len(NAMES) > 60


@ALL
def test_example_that_runs(value):
    """That it runs, and prints what it says, is the doctests' matter."""
    assert ">>> " in (value.__doc__ or ""), "no example in the doc string"


@ALL
def test_every_parameter_is_described(value):
    if inspect.isclass(value) and issubclass(value, Exception):
        return
    described = set(re.findall(r":param (?:\w+ )?(\w+):", value.__doc__ or ""))
    is_record = hasattr(value, "_fields") or hasattr(value, "__dataclass_fields__")
    if inspect.isclass(value) and is_record:
        described |= described_fields(value)
    needed = set(inspect.signature(value).parameters) - OF_PYRO
    assert needed - described == set(), "parameters without :param name:"
    assert described - needed - OF_PYRO == set(), ":param name: of no parameter"


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_what_is_returned_is_described(function):
    """A method without a doc string has that of the method that it overrides."""
    hint = inspect.signature(function).return_annotation
    assert hint is not inspect.Signature.empty, "no annotation of what is returned"
    described = ":returns:" in (inspect.getdoc(function) or "")
    assert described == (hint not in NOTHING), f":returns: in the doc string, and it returns {hint}"


def test_methods_are_found_where_they_are_defined():
    found = set(FUNCTIONS)
    assert "pyro_sde.distributions.path.PathDistribution.draw" in found
    assert "pyro_sde.guides.posterior_summary.PosteriorSummaryMixin.median" in found
    assert "pyro_sde.guides.auto_sde.AutoSDE.register_buffer" not in found


@pytest.mark.parametrize("module", public_modules())
def test_names_are_sorted_and_there(module):
    public = importlib.import_module(module)
    assert list(public.__all__) == sorted(public.__all__)
    assert all(hasattr(public, name) for name in public.__all__)
