"""`python -m vlmtrain` is `vlmtrain`."""

from vlmtrain.cli import run

run()
