"""Where `polar` and `python -m polarlike` start: a Ctrl-C while modules still load, or while Python ends, is no
traceback."""

import signal
import sys


def main() -> None:
    try:
        from polarlike.cli import main as run

        run()
    except KeyboardInterrupt:
        print("polar: stopped.", file=sys.stderr)
        sys.exit(1)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)  # all is closed: what waits for a last thread may be killed


if __name__ == "__main__":
    main()
