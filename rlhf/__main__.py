"""`python -m rlhf`: the same as the `rlhf` command."""

from rlhf.cli import main

if __name__ == "__main__":
    main()
