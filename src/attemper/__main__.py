"""`python -m attemper` is the command line."""

from attemper.lab.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
