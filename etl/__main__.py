"""`python -m etl`."""

import sys

from etl.terminal import main

if __name__ == "__main__":
    sys.exit(main())
