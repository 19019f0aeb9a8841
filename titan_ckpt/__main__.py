"""`python -m titan_ckpt`: the same as the `titan-ckpt` command."""

import sys

from titan_ckpt.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
