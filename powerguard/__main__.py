"""python -m powerguard: the same as `powerguard`."""

import sys

from powerguard.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
