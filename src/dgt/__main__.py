"""`python -m dgt` is `dgt`."""

import sys

from dgt_command import main

if __name__ == "__main__":
    sys.exit(main())
