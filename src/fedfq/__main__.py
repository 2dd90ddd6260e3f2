"""`python -m fedfq`: the `fedfq` command, where its script is not on the PATH."""

from fedfq.cli import main

if __name__ == "__main__":
    main()
