"""``python -m kvloft.cli`` is the ``kvloft`` command."""

import sys

from kvloft.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
