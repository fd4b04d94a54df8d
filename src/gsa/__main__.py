"""`python -m gsa` is the command `gsa`."""

from gsa.cli import main

if __name__ == "__main__":
    main()
