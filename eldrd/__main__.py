"""`python -m eldrd`: the command line, nothing else."""

from eldrd.cli import main

if __name__ == "__main__":
    main()
