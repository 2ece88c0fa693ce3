"""Runs test functions where pytest or hypothesis is not installed: python plain_tests.py FILE...

Knows what tests/gpu uses of pytest: parametrize marks, skip, raises, fixtures without arguments
are not. Anything else of pytest or hypothesis is a stand-in that does nothing, so that modules
which only share helpers can be imported. Where pytest is installed, use that.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import itertools
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


class Skipped(Exception):
    """What pytest.skip raises."""


class _Anything:
    """Stands for decorators, strategies and settings that are not needed: callable, chainable."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # As a decorator it returns the function it is put on.
        if len(args) == 1 and inspect.isfunction(args[0]) and not kwargs:
            return args[0]
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __or__(self, other: Any) -> Any:  # strategies are joined so
        return self


class _Mark(_Anything):
    def parametrize(self, names: Any, values: Any, **kwargs: Any) -> Callable:
        keys = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)

        def decorate(function: Any) -> Any:
            rows = [dict(zip(keys, v if len(keys) > 1 else (v,), strict=True)) for v in values]
            function.plain_cases = [rows, *getattr(function, "plain_cases", [])]
            return function

        return decorate


@contextlib.contextmanager
def _raises(kind: Any, match: str | None = None) -> Iterator[Any]:
    info = types.SimpleNamespace(value=None)
    try:
        yield info
    except kind as error:
        info.value = error
        assert match is None or re.search(match, str(error)), f"{error} does not match {match!r}"
    else:
        raise AssertionError(f"{kind} was not raised")


def _skip(reason: str = "", **kwargs: Any) -> None:
    raise Skipped(reason)


def install_stand_ins() -> list[str]:
    """Puts stand-ins for missing modules into sys.modules; returns their names."""
    missing = [m for m in ("pytest", "hypothesis") if importlib.util.find_spec(m) is None]
    if "pytest" in missing:
        module: Any = types.ModuleType("pytest")
        module.mark, module.raises, module.skip = _Mark(), _raises, _skip
        module.fixture = module.param = module.importorskip = _Anything()
        sys.modules["pytest"] = module
    if "hypothesis" in missing:
        module = types.ModuleType("hypothesis")
        module.given = module.settings = module.assume = module.example = _Anything()
        module.HealthCheck = _Anything()
        module.strategies = types.ModuleType("hypothesis.strategies")
        module.strategies.__getattr__ = _Anything().__getattr__  # dunders stay missing
        sys.modules |= {"hypothesis": module, "hypothesis.strategies": module.strategies}
    return missing


def cases(function: Any) -> Iterator[dict[str, Any]]:
    """The arguments of every parametrized case; one empty case without parameters."""
    for combination in itertools.product(*getattr(function, "plain_cases", [])):
        yield {key: value for part in combination for key, value in part.items()}


def run_file(path: Path) -> tuple[int, int, int]:
    """(passed, failed, skipped) of one test file, each failure printed with its traceback."""
    name = ".".join(path.resolve().relative_to(ROOT).with_suffix("").parts)
    try:
        module = importlib.import_module(name)
    except Skipped as reason:
        print(f"{path}: skipped, {reason}")
        return 0, 0, 1
    passed = failed = skipped = 0
    for test, function in list(vars(module).items()):
        # Tests that are imported from another module run with that module.
        if not test.startswith("test_") or getattr(function, "__module__", name) != name:
            continue
        for arguments in cases(function):
            wanted = set(inspect.signature(function).parameters)
            if wanted != set(arguments):
                print(f"{test}: skipped, it needs fixtures: {wanted - set(arguments)}")
                skipped += 1
                continue
            try:
                function(**arguments)
                passed += 1
            except Skipped as reason:
                print(f"{test}: skipped, {reason}")
                skipped += 1
            except Exception:
                print(f"{test}({arguments}) failed")
                traceback.print_exc(file=sys.stdout)
                failed += 1
    return passed, failed, skipped


def main(paths: list[str]) -> int:
    sys.path.insert(0, str(ROOT))
    missing = install_stand_ins()
    print(f"{' and '.join(missing) or 'nothing'} missing: run by benchmarks/plain_tests.py")
    totals = [run_file(Path(path)) for path in paths]
    passed, failed, skipped = (sum(column) for column in zip(*totals, strict=True))
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
