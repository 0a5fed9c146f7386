"""`python -m dgt` is `dgt`."""

import sys

from dgt.cli import main

sys.exit(main())
