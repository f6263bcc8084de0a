"""Where `polar` and `python -m polarlike` start: a Ctrl-C while the command's modules still load is no traceback."""

import sys


def main() -> None:
    try:
        from polarlike.cli import main as run

        run()
    except KeyboardInterrupt:
        print("polar: stopped.", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
