"""Markers in csrc and mutants in the catalogue name each other."""

from __future__ import annotations

from collections import Counter

from tests.kernels import tile_mutants

from .checks import CASES
from .mutants import CATALOGUE
from .mutants.mutant import CSRC, Mutant, markers, plant


def test_markers_and_mutants_name_each_other() -> None:
    suffixes = (".cu", ".cuh", ".cpp", ".h", ".inl")
    sources = [p.read_text() for p in CSRC.rglob("*") if p.suffix in suffixes]
    count = Counter(marker for code in sources for marker in markers(code))
    assert sum(count.values()) == sum(code.count("mutant: ") for code in sources), "a bad marker"
    assert not [m for m, n in count.items() if n > 1], "markers that stand twice"
    used = {m.marker for m in (*CATALOGUE, *tile_mutants.MUTANTS)}
    assert not set(count) - used, "markers that no mutant uses"
    assert not used - set(count), "mutants without a marker"


def test_mutants_are_distinct() -> None:
    for which in (str, lambda m: (m.family, m.marker, m.new)):
        counts = Counter(map(which, CATALOGUE))
        assert not [n for n, count in counts.items() if count > 1]
    for mutant in CATALOGUE:
        assert mutant.case in CASES[mutant.family], f"{mutant}: no case {mutant.case!r}"
        assert mutant.engine in ("fibers", "ptx", "sanitized") and (
            mutant.engine == "fibers" or not mutant.canary
        )


CODE = """
  f(a,
    b);  // mutant: call
  // mutant: sum
  x += 1;  // a comment
  if (a < b) {  // mutant: if
    return a ? g(1, 2) : 3;  // mutant: return
  }
  for (int i = 0; i < n; ++i) {  // mutant: for
  const int c[] = {1, /* mutant: element */ a + f(b, c), 3};
  asm(/* mutant: text */ "ld.a [%0];" : "r"(x));
"""


def _planted(marker: str, new: str, condition: str = "true") -> list[str]:
    planted = plant(CODE, [(condition, Mutant("", "", marker, new))])
    assert planted.count("\n") == CODE.count("\n"), "lines keep their numbers"
    lines = zip(CODE.splitlines(), planted.splitlines(), strict=True)
    changed = [b.split("  //")[0].strip() for a, b in lines if a != b]
    return [line for line in changed if line]


def test_plant() -> None:
    assert _planted("call", "f(b, a);") == ["f(b, a);"]
    assert _planted("call", "") == [";"]
    assert _planted("sum", "2") == ["x += 2;"]
    assert _planted("sum", "2", "on") == ["x += (on ? (2) : (1));"]
    assert _planted("sum", "$; $;", "on") == ["if (on) { x += 1; x += 1; } else { x += 1; }"]
    assert _planted("if", "$ + 1") == ["if (a < b + 1) {"]
    assert _planted("return", "4", "on") == ["return (on ? (4) : (a ? g(1, 2) : 3));"]
    assert _planted("for", "i <= n") == ["for (int i = 0; i <= n; ++i) {"]
    assert _planted("element", "0", "on")[0].endswith("*/ (on ? (0) : (a + f(b, c))), 3};")
    assert _planted("text", '"ld.b;"') == ['asm(/* mutant: text */ "ld.b;" : "r"(x));']


def test_two_mutants_of_one_marker() -> None:
    both = [("one", Mutant("", "", "sum", "2")), ("two", Mutant("", "", "sum", ""))]
    assert "if (two) {  } else { x += (one ? (2) : (1)); }" in plant(CODE, both)
