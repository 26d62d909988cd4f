"""The entry point of the `mtpjax` command, which Ctrl-C ends with a one-line message, even during its imports."""

import sys

from mtpjax.cli.interrupts import defer_interrupts
from mtpjax.errors import INTERRUPTED


def main() -> None:
    """Runs the command and exits, as described in `mtpjax.cli.main.main`."""
    defer_interrupts()
    try:
        from mtpjax.cli.main import main as run

        run()
    except KeyboardInterrupt:
        print("mtpjax: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
