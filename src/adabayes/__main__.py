"""Makes ``python -m adabayes`` the command line."""

from adabayes.cli import main

if __name__ == "__main__":
    main()
