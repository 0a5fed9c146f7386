"""The `dgt` command: parses, refuses what it can already see is wrong, and only then loads the
package `dgt`.

Loading PyTorch takes seconds, so this package stands beside `dgt` and needs little more than Click:
help, wrong arguments and wrong keys of a recipe are answered at once. Each command is a function
with its options as typed arguments, which imports what does the work when it is called.

Exit status: 0 done; 1 something failed on the way (an image that cannot be read, a loss that is not
finite); 2 bad usage or bad input, reported in one sentence on stderr; 130 interrupted.
"""

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        arguments: the words after `dgt`; None for those of this process.
    """
    # here: `dgt` itself reads recipes by this package, and needs no Click for it
    from dgt_command.cli import run

    return run(arguments)
