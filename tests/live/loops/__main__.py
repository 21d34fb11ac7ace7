"""`python -m tests.live.loops > bench/notes/training-loops.md`: the page that lists all loops, family by family."""

from tests.live.loops.page import page

print(page(), end="")
