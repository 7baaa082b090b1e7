"""``python -m tilewise COMMAND``: the command line."""

from tilewise.cli.__main__ import main

if __name__ == "__main__":
    main()
