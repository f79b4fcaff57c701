"""`python -m moetap`, for interpreters whose scripts are not on the path."""

import sys

from moetap.cli import main

sys.exit(main())
