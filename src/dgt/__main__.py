"""`python -m dgt` is `dgt`."""

import sys

from dgt_command import main

sys.exit(main())
